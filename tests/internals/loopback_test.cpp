// SPDX-License-Identifier: BSD-3-Clause
// Which addresses a process group keeps to the loopback network.
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include "torchamp/detail/extras/distributed/loopback.h"

namespace {

using torchamp::detail::is_loopback;

TEST(ProcessGroup, TakesOnlyAddressesForTheLoopbackNetwork) {
  for (const char* host : {"localhost", "127.0.0.1", "127.5.6.7"}) EXPECT_TRUE(is_loopback(host));
  for (const char* host : {"127.example.invalid", "127.", "127.0.0.1.example.invalid", "128.0.0.1",
                           "10.0.0.127", ""}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

}  // namespace

#endif
