// SPDX-License-Identifier: BSD-3-Clause
// The variable TORCHAMP_POLICY in a program that cannot read policy files.
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "torchamp/autocast.h"
#include "torchamp/detail/core/autocast/environment.h"

namespace {

TEST(Environment, AFileIsAnErrorThatNamesTheHeaderIfNoSourceFileReadsPolicies) {
  EXPECT_ERROR(
      torchamp::detail::environment_policy("file:some.policy", /*read_file=*/nullptr),
      "TORCHAMP_POLICY is 'file:some.policy', and this program does not read policy files. "
      "Include torchamp/policy_text.h");
}

}  // namespace
