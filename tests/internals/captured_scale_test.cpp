// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/graph/captured_scale.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "simulated_device/device.h"
#include "support/devices.h"

namespace {

using torchamp::GradScalerOptions;
using torchamp::detail::CapturedScale;
using torchamp::detail::ScaleBound;

std::shared_ptr<ScaleBound> bound_at(double scale) {
  auto bound = std::make_shared<ScaleBound>();
  bound->set(scale);
  return bound;
}

TEST(CapturedScale, MovesAsTheOptionsSay) {
  const auto moved = [](const GradScalerOptions& options, bool lowers) {
    const auto bound = bound_at(8.);
    bound->update(options, lowers);
    return std::pair(bound->value(), bound->at_most());
  };
  EXPECT_EQ(moved(GradScalerOptions::fixed(8.), true), std::pair(8., 8.));
  GradScalerOptions options{.growth_interval = 1};
  EXPECT_EQ(moved(options, false), std::pair(8., 16.));
  EXPECT_NEAR(moved(options, true).first, 4., 1e-5);
  options.growth_interval = 2;
  EXPECT_EQ(moved(options, false), std::pair(8., 8.));
}

TEST(CapturedScale, WantsRoomForReplaysThatMoveIt) {
  const auto may_be_outside = [](const GradScalerOptions& options, double scale) {
    CapturedScale captured(bound_at(scale), torch::full({}, scale), options);
    return std::pair(captured.may_be_below(1.), captured.may_be_above(0x1p10));
  };
  EXPECT_EQ(may_be_outside({}, 8.), std::pair(true, false));
  EXPECT_EQ(may_be_outside({}, 16.), std::pair(false, false));
  EXPECT_EQ(may_be_outside({}, 64.), std::pair(false, false));
  EXPECT_EQ(may_be_outside({}, 128.), std::pair(false, true));
  for (const double scale : {1., 0x1p10}) {
    EXPECT_EQ(may_be_outside(GradScalerOptions::fixed(scale), scale), std::pair(false, false));
  }
}

class CapturedScaleOn : public ::testing::TestWithParam<at::DeviceType> {};
INSTANTIATE_TEST_SUITE_P(Devices, CapturedScaleOn, ::testing::Values(at::kCPU, at::kPrivateUse1),
                         device_name);

TEST_P(CapturedScaleOn, HoldsWhereTheDeviceIsFarFromTheLimit) {
  SKIP_WITHOUT(GetParam());
  for (const double at_last : {2., 4., 64.}) {
    const at::Tensor scale = torch::full({}, at_last, GetParam());
    CapturedScale captured(bound_at(64.), scale, {});
    EXPECT_FALSE(captured.may_be_below(1.));
    captured.add_update(/*lowers=*/true);
    for (int replay = 0; replay < 5; ++replay) {
      EXPECT_TRUE(captured.holds());
      captured.note_replay();
    }
    captured.note_replay();
    captured.note_replay();                       // may have lowered it to a half
    if (GetParam() != at::kCPU) captured.look();  // which arrives when it is waited for
    EXPECT_EQ(captured.holds(), at_last >= 4.) << at_last;
  }
}

TEST(CapturedScale, IsLookedAtWhereItIsLoweredAndTakenForLargeEnough) {
  for (const bool lowers : {false, true}) {
    for (const bool taken : {false, true}) {
      CapturedScale captured(bound_at(64.), torch::full({}, 64.), {});
      if (taken) {
        EXPECT_FALSE(captured.may_be_below(1.));
      }
      captured.add_update(lowers);
      EXPECT_EQ(captured.wants_look(), lowers && taken);
    }
  }
  CapturedScale large(bound_at(0x1p16), torch::full({}, 0x1p16), {});
  EXPECT_FALSE(large.may_be_below(1.));
  large.add_update(true);
  EXPECT_FALSE(large.wants_look()) << "far away";
}

}  // namespace
