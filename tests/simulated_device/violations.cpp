// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include "simulated_device/streams.h"

namespace simulated {

namespace {

/// Fails each test that left violations.
class Listener final : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo&) override {
    for (const std::string& text : take_violations()) {
      ADD_FAILURE() << "simulated device: " << text;
    }
  }
};

[[maybe_unused]] const bool listening = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Listener);
  return true;
}();

}  // namespace

}  // namespace simulated
