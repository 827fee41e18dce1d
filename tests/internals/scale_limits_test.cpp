// SPDX-License-Identifier: BSD-3-Clause
// Which options make a scaler on a device look at its scale's limits.
#include <gtest/gtest.h>
#include <torchamp/grad_scaler.h>

namespace {

using torchamp::GradScalerOptions;
using torchamp::detail::ScaleLimits;

TEST(GradScalerLimits, AreNotWatchedOnADeviceByDefault) {
  EXPECT_FALSE(ScaleLimits::watched({}));
  EXPECT_TRUE(ScaleLimits::watched({.min_scale = 1.}));
  EXPECT_TRUE(ScaleLimits::watched(GradScalerOptions::deepspeed()));
  EXPECT_FALSE(ScaleLimits::watched(GradScalerOptions::megatron()));
  EXPECT_TRUE(ScaleLimits::watched({.max_skips_in_a_row = 9}));
}

}  // namespace
