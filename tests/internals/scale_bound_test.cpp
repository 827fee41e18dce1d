// SPDX-License-Identifier: BSD-3-Clause
// What the host knows of a scale that only the device knows exactly.
#include <torchamp/detail/core/scaler/scale_bound.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/detail/core/scaler/loss_scale.h>
#include <torchamp/detail/extras/graph/captured_scale.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>

#include "support/call_counter.h"
#include "support/devices.h"
#include "support/random_iterations.h"

using torchamp::GradScalerOptions;
using torchamp::detail::BoundCopies;
using torchamp::detail::LossScale;
using torchamp::detail::ScaleBound;

namespace {

/// An update that may have lowered a scale, and has not raised it.
void lower(ScaleBound& bound, double factor, double min_scale) {
  bound.update({.growth_factor = 1., .backoff_factor = factor, .min_scale = min_scale}, true);
}
/// One that may have raised it only.
void grow(ScaleBound& bound, double factor, int64_t interval) {
  bound.update({.growth_factor = factor, .growth_interval = interval}, false);
}

TEST(ScaleBound, IsNeverAboveTheScaleAndNotFarBelowASmallOne) {
  std::mt19937 random(5);
  const torch::NoGradGuard no_grad;
  for (const double factor : {0.5, 0.9, 1e-3}) {
    SCOPED_TRACE(factor);
    const GradScalerOptions options{
        .growth_factor = 1.7, .backoff_factor = factor, .growth_interval = 2};
    LossScale state(options);
    state.create(at::kCPU);
    state.leave_host();
    ScaleBound bound;
    bound.set(options.init_scale);
    for (const bool bad : random_iterations(random(), 300)) {
      state.advance(torch::full({}, bad ? 1.F : 0.F));
      bound.update(options, /*lowers=*/true);
      bound.look_at(state.scale());
      const double scale = state.read_scale();
      ASSERT_LE(bound.value(), scale);
      ASSERT_GE(bound.at_most(), scale * 0.99999);
      if (scale < 1000.) {
        ASSERT_LE(bound.at_most(), scale * 3. / factor);
      }
      // On a CPU what is asked for is there at once.
      ASSERT_GE(bound.value(), std::min(scale, 1000.) * factor * 0.99);
      ASSERT_TRUE(state.may_be_below_one() || scale >= 1.);
    }
    bound.set(0.25);
    EXPECT_EQ(bound.value(), 0.25);
  }
}

TEST(ScaleBound, HasOneCopyUnderWayAtATime) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const torch::NoGradGuard no_grad;
  const at::Device device(at::kPrivateUse1, 0);
  const at::Tensor scale = torch::full({}, 64., device);
  ScaleBound bound;
  bound.set(64.);
  const simulated::Counts counts;
  double known = 64.;
  const auto lower_it = [&] {
    scale.mul_(0.5);
    known *= 0.5;
    lower(bound, 0.5, 0x1p-20);
    bound.look_at(scale);
    EXPECT_LE(bound.value(), known);
    EXPECT_GE(bound.value(), known * 0.99);
  };
  for (int i = 0; i < 4; ++i) lower_it();
  EXPECT_EQ(counts.now().device_to_host, 1) << "the first has not arrived";
  simulated::wait_for_device(0);
  lower_it();
  EXPECT_EQ(counts.now().device_to_host, 2);
  simulated::wait_for_device(0);
  EXPECT_LE(bound.value(), known);
}

/// A scale on the simulated device, which is behind the host, and its bound.
struct BoundOnDevice {
  explicit BoundOnDevice(double value)
      : scale(torch::full({}, value, at::Device(at::kPrivateUse1, 0))) {
    bound.set_unknown(0x1p24);
    BoundCopies::send(bound, scale);
  }
  void arrive() const { simulated::wait_for_device(0); }
  const torch::NoGradGuard no_grad;
  at::Tensor scale;
  ScaleBound bound;
};

TEST(ScaleBound, CountsWhatUpdatesHaveDoneSinceACopyWasMade) {
  SKIP_WITHOUT(at::kPrivateUse1);
  BoundOnDevice lowered(64.), grown(64.);
  lower(lowered.bound, 0.5, 0x1p-20);
  lowered.arrive();
  EXPECT_LE(lowered.bound.value(), 32.);
  EXPECT_GE(lowered.bound.value(), 31.9);
  EXPECT_EQ(lowered.bound.at_most(), 64.);
  grow(grown.bound, 2., 5);  // nobody knows how many good iterations there were before
  grow(grown.bound, 2., 5);
  grown.arrive();
  EXPECT_EQ(grown.bound.value(), 64.);
  EXPECT_EQ(grown.bound.at_most(), 128.);
}

TEST(ScaleBound, IsNotChangedByACopyOfAScaleThatHasBeenReplaced) {
  SKIP_WITHOUT(at::kPrivateUse1);
  for (const double set : {2., 4096.}) {
    BoundOnDevice old(64.);
    old.bound.set(set);
    old.arrive();
    EXPECT_EQ(old.bound.value(), set);
    EXPECT_EQ(old.bound.at_most(), set);
  }
}

TEST(ScaleBound, KnowsNoMoreFromACopyThanItDidBefore) {
  SKIP_WITHOUT(at::kPrivateUse1);
  BoundOnDevice zero(0.);  // which no update makes
  zero.arrive();
  EXPECT_EQ(zero.bound.value(), 0.);
  EXPECT_EQ(zero.bound.at_most(), 0x1p24);
  BoundOnDevice low(64.);
  lower(low.bound, 0.5, 256.);
  low.arrive();
  EXPECT_EQ(low.bound.value(), 256.) << "of both, what is nearer";
}

TEST(ScaleBound, WaitsForItsOldestCopyAndUsesItAgain) {
  SKIP_WITHOUT(at::kPrivateUse1);
  BoundOnDevice behind(64.);
  BoundCopies::send(behind.bound, behind.scale);
  EXPECT_TRUE(BoundCopies::wait_for_one(behind.bound));
  const CallCounter calls;
  BoundCopies::send(behind.bound, behind.scale);  // where the first copy was
  EXPECT_EQ(calls.called("aten::empty"), 0);
  EXPECT_TRUE(BoundCopies::wait_for_one(behind.bound));
  EXPECT_TRUE(BoundCopies::wait_for_one(behind.bound))
      << "the one before has not waited for this one";
  EXPECT_FALSE(BoundCopies::wait_for_one(behind.bound));
}

TEST(ScaleBound, HasACopyMadeOfASmallScaleOnly) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const torch::NoGradGuard no_grad;
  const at::Tensor scale = torch::full({}, 2048., at::Device(at::kPrivateUse1, 0));
  ScaleBound bound;
  bound.set(2049.);
  const simulated::Counts counts;
  lower(bound, 0.5, 0x1p-20);
  bound.look_at(scale);
  EXPECT_EQ(counts.now().device_to_host, 0);
  lower(bound, 0.999, 0x1p-20);
  bound.look_at(scale);
  EXPECT_EQ(counts.now().device_to_host, 1);
  simulated::wait_for_device(0);
}

TEST(LossScale, NeverTakesTheScaleForSmallerThanItIs) {
  for (const int64_t interval : {1, 3, 7}) {
    torchamp::GradScalerOptions options{.init_scale = 4., .growth_interval = interval};
    LossScale state(options);
    state.create(at::kCPU);
    EXPECT_FALSE(state.may_exceed(4.));
    EXPECT_TRUE(state.may_exceed(3.));
    state.leave_host();
    std::mt19937 random(5);
    int seen = 0;
    for (int i = 0; i < 150; ++i) {
      if (i == 60) options.growth_interval = interval == 7 ? 2 : interval;
      if (i == 60) state.set_growth_interval(options.growth_interval);
      if (i == 90) state.set_scale(16.);
      if (i == 120) state.set_scale(torch::full({}, 1024.));
      state.advance(torch::full({}, random() % 12 == 0 ? 1. : 0.));
      const double scale = state.read_scale();
      for (double limit = 0x1p-4; limit < 0x1p40; limit *= 2.) {
        ASSERT_TRUE(state.may_exceed(limit) || scale <= limit) << i << ' ' << limit;
        seen += state.may_exceed(limit) ? 0 : 1;
      }
    }
    EXPECT_GT(seen, 150) << "nor for as large as can be";
    state.expect_replays();
    EXPECT_TRUE(state.may_exceed(0x1p100));
    options.max_scale = 0x1p20;
    LossScale limited(options);
    limited.create(at::kCPU);
    limited.leave_host();
    limited.expect_replays();
    EXPECT_FALSE(limited.may_exceed(0x1p20));
  }
}

}  // namespace
