// SPDX-License-Identifier: BSD-3-Clause
// Random states by device, as files hold them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "torchamp/detail/extras/shared/rng_state.h"

namespace {

using at::Tensor;
using torchamp::detail::RngState;

TEST(RngState, NamesADeviceThatIsNotHereAndAStateThatIsNone) {
  const Tensor none = at::zeros({16}, at::kByte);
  EXPECT_ERROR(RngState::from({{"xpu:0", none}}),
               "it holds the random state of xpu:0, and this machine has no such device.");
  EXPECT_ERROR(RngState::from({{"cuda:99", none}}), "the random state of cuda:99");
  EXPECT_ERROR(RngState::from({{"cpu", none}}), "state");
  at::manual_seed(1);
  const auto now = RngState::now();
  const Tensor next = at::rand({2});
  RngState::from(now.by_device()).apply();
  EXPECT_TRUE(at::equal(at::rand({2}), next));
}

}  // namespace
