// SPDX-License-Identifier: BSD-3-Clause
// What update() does at the floor of the scale and after too many skips in a row.
#include <torchamp/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "support/expect_error.h"
#include "support/on_device.h"
#include "support/optimizers.h"
#include "support/warnings.h"

using ::testing::HasSubstr;
using torchamp::AtLimit;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::ScaleLimit;

namespace {

void step(GradScaler& scaler, bool bad) {
  scaler.scale(torch::ones({}));
  auto optimizer = sgd({parameter_with(torch::full({1}, bad ? HUGE_VAL : 1.))}, 0.);
  scaler.step(optimizer);
}

void iterate(GradScaler& scaler, bool bad) {
  step(scaler, bad);
  scaler.update();
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace

TEST(GradScalerLimits, KeepsGoingAtTheFloor) {
  GradScaler scaler({.init_scale = 2., .min_scale = 1., .at_min_scale = AtLimit::keep_going});
  const CollectedWarnings warnings;
  for (int i = 0; i < 5; ++i) iterate(scaler, true);
  EXPECT_EQ(scaler.get_scale(), 1.);
  EXPECT_EQ(scaler.skips_in_a_row(), 5);
  EXPECT_EQ(warnings.text(), "");
}

TEST(GradScalerLimits, WarnsOnceForEachTimeThatTheFloorIsReached) {
  GradScaler scaler({.init_scale = 2., .growth_interval = 2, .min_scale = 1.});
  const CollectedWarnings warnings;
  iterate(scaler, true);
  EXPECT_EQ(warnings.text(), "") << "lowered to the floor; nothing was refused yet";
  for (int i = 0; i < 3; ++i) iterate(scaler, true);
  EXPECT_EQ(count(warnings.text(), "and the scale, 1, is at min_scale"), 1U);
  iterate(scaler, false);
  iterate(scaler, true);
  EXPECT_EQ(count(warnings.text(), "at min_scale"), 1U) << "it has not left the floor since";
  iterate(scaler, false);
  iterate(scaler, false);
  ASSERT_EQ(scaler.get_scale(), 2.);
  for (int i = 0; i < 3; ++i) iterate(scaler, true);
  EXPECT_EQ(count(warnings.text(), "at min_scale"), 2U);
}

TEST(GradScalerLimits, ThrowsAtTheFloorAndChangesNothing) {
  GradScaler scaler({.init_scale = 2., .min_scale = 1., .at_min_scale = AtLimit::throw_error});
  iterate(scaler, true);
  step(scaler, true);
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(scaler.update(),
                 "GradScaler::update: gradients hold infs or NaNs and the scale, 1");
    EXPECT_EQ(scaler.skips_in_a_row(), 1);
    EXPECT_EQ(scaler.get_scale(), 1.);
  }
  scaler.update(4.);
  iterate(scaler, false);
  EXPECT_EQ(scaler.get_scale(), 4.) << "the program may go on with a scale of its own";
}

TEST(GradScalerLimits, CallsBackAtTheFloorAndMaySetTheScaleThere) {
  std::vector<ScaleLimit> calls;
  GradScaler* self = nullptr;
  GradScaler scaler({.init_scale = 2.,
                     .min_scale = 1.,
                     .at_min_scale = AtLimit::call,
                     .on_limit = [&](const ScaleLimit& limit) {
                       calls.push_back(limit);
                       EXPECT_TRUE(torch::GradMode::is_enabled());
                       if (calls.size() == 2) self->update(16.);
                     }});
  self = &scaler;
  iterate(scaler, true);
  EXPECT_TRUE(calls.empty());
  iterate(scaler, true);
  iterate(scaler, true);
  ASSERT_EQ(calls.size(), 2U);
  EXPECT_EQ(calls[0].kind, ScaleLimit::Kind::min_scale);
  EXPECT_EQ(calls[0].scale, 1.);
  EXPECT_EQ(calls[0].skips_in_a_row, 2);
  EXPECT_EQ(calls[1].skips_in_a_row, 3);
  EXPECT_EQ(scaler.get_scale(), 16.);
}

TEST(GradScalerLimits, CountsSkipsInARow) {
  GradScaler scaler({.max_skips_in_a_row = 3});
  for (int run = 0; run < 2; ++run) {
    iterate(scaler, true);
    iterate(scaler, true);
    EXPECT_EQ(scaler.skips_in_a_row(), 2);
    iterate(scaler, false);
    EXPECT_EQ(scaler.skips_in_a_row(), 0);
  }
  iterate(scaler, true);
  iterate(scaler, true);
  step(scaler, true);
  EXPECT_ERROR(scaler.update(),
               "gradients held infs or NaNs in 3 consecutive iterations; max_skips_in_a_row is 3");
  EXPECT_EQ(scaler.skips_in_a_row(), 2);
}

TEST(GradScalerLimits, WarnsOrCallsAfterEverySoManySkips) {
  std::vector<int64_t> calls;
  GradScaler calling({.max_skips_in_a_row = 2,
                      .at_max_skips = AtLimit::call,
                      .on_limit = [&](const ScaleLimit& limit) {
                        EXPECT_EQ(limit.kind, ScaleLimit::Kind::skips_in_a_row);
                        calls.push_back(limit.skips_in_a_row);
                      }});
  GradScaler warning({.max_skips_in_a_row = 2, .at_max_skips = AtLimit::warn});
  const CollectedWarnings warnings;
  for (int i = 0; i < 5; ++i) {
    iterate(calling, true);
    iterate(warning, true);
  }
  EXPECT_EQ(calls, (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(count(warnings.text(), "iterations in a row"), 2U);
}

TEST(GradScalerLimits, AreMetWithoutScalingToo) {
  auto options = GradScalerOptions::skip_non_finite();
  options.max_skips_in_a_row = 2;
  GradScaler scaler(options);
  iterate(scaler, true);
  step(scaler, true);
  EXPECT_ERROR(scaler.update(), "2 consecutive iterations");
}

TEST(GradScalerLimits, ReachTheHostOneUpdateLaterIfOnlyTheDeviceKnows) {
  std::vector<ScaleLimit> calls;
  GradScaler scaler({.init_scale = 2.,
                     .min_scale = 1.,
                     .at_min_scale = AtLimit::call,
                     .max_skips_in_a_row = 3,
                     .on_limit = [&](const ScaleLimit& limit) { calls.push_back(limit); }});
  scaler.scale(torch::ones({}));
  move_to_device(scaler);
  iterate(scaler, true);
  iterate(scaler, true);
  iterate(scaler, true);
  EXPECT_EQ(calls.size(), 2U) << "what the first two updates have told";
  EXPECT_EQ(calls[0].kind, ScaleLimit::Kind::min_scale);
  step(scaler, false);
  EXPECT_ERROR(scaler.update(), "gradients held infs or NaNs in 3 consecutive iterations");
  EXPECT_EQ(scaler.skips_in_a_row(), 3);
  scaler.update();
  EXPECT_EQ(scaler.skips_in_a_row(), 0) << "the same news is told once";
  iterate(scaler, false);
  EXPECT_EQ(calls.size(), 2U);
}

TEST(GradScalerLimits, AFixedScaleIsAtNoFloorOnADeviceEither) {
  for (const bool on_device : {false, true}) {
    std::vector<ScaleLimit> calls;
    auto options = GradScalerOptions::fixed(4.);
    options.min_scale = 4.;
    options.at_min_scale = AtLimit::call;
    options.on_limit = [&](const ScaleLimit& limit) { calls.push_back(limit); };
    GradScaler scaler(options);
    scaler.scale(torch::ones({}));
    if (on_device) move_to_device(scaler);
    for (int i = 0; i < 3; ++i) iterate(scaler, true);
    EXPECT_EQ(scaler.skips_in_a_row(), 3);
    EXPECT_TRUE(calls.empty()) << (on_device ? "on a device" : "on the host");
  }
}

/// What must be said once, whatever the options.
const char* const hundred_skips = "gradients held infs or NaNs in the last ";

TEST(GradScalerLimits, WarnOnceAfterAHundredSkipsInARow) {
  GradScalerOptions watched{.max_skips_in_a_row = 1000};
  for (const GradScalerOptions& options :
       {GradScalerOptions::skip_non_finite(), GradScalerOptions(), GradScalerOptions::megatron(),
        watched}) {
    for (const bool on_device : {false, true}) {
      GradScaler scaler(options);
      scaler.scale(torch::ones({}));
      if (on_device) move_to_device(scaler);
      const CollectedWarnings warnings;
      for (int i = 0; i < 99; ++i) iterate(scaler, true);
      iterate(scaler, false);
      for (int i = 0; i < 99; ++i) iterate(scaler, true);
      EXPECT_EQ(count(warnings.text(), hundred_skips), 0U);
      for (int i = 0; i < (on_device ? 33 : 1); ++i) iterate(scaler, true);
      EXPECT_EQ(count(warnings.text(), hundred_skips), 1U) << on_device;
      for (int i = 0; i < 150; ++i) iterate(scaler, true);
      EXPECT_EQ(count(warnings.text(), hundred_skips), 1U) << on_device;
      EXPECT_THAT(warnings.text(), HasSubstr("overflow_report()"));
      EXPECT_THAT(warnings.text(), HasSubstr("first_non_finite_op()"));
    }
  }
}

/// if (scaler.step(optimizer)) optimizer.zero_grad();
TEST(GradScalerLimits, WarnOfGradientsOfASkippedStepThatWereNotCleared) {
  constexpr const char* not_cleared = "gradients of the last skipped step were not cleared";
  for (const GradScalerOptions& options :
       {GradScalerOptions(), GradScalerOptions::fixed(2.), GradScalerOptions::skip_non_finite()}) {
    for (const bool fused : {false, true}) {
      for (const bool on_device : {false, true}) {
        for (int cleared = 0; cleared < 4; ++cleared) {
          SCOPED_TRACE(c10::str("scale ", options.init_scale, fused ? ", fused, " : ", ", on_device,
                                ", cleared ", cleared));
          GradScaler scaler(options);
          scaler.scale(torch::ones({}));
          if (on_device) move_to_device(scaler);
          const at::Tensor w = torch::zeros({2}).requires_grad_();
          const auto optimizer = plain_or_fused_sgd({w}, fused, 0.);
          const CollectedWarnings warnings;
          for (int i = 0; i < 133; ++i) {
            // At once, not after a hundred skips.
            if (i == 2) {
              EXPECT_EQ(count(warnings.text(), not_cleared), cleared == 0 ? 1U : 0U);
            }
            const bool bad = cleared != 0 || i == 0;
            if (cleared == 1) optimizer->zero_grad(/*set_to_none=*/true);
            if (cleared == 2) optimizer->zero_grad(/*set_to_none=*/false);
            const at::Tensor scaled = scaler.scale((w * (bad ? HUGE_VAL : 1.)).sum());
            if (cleared == 3) optimizer->zero_grad();
            scaled.backward();
            scaler.step(*optimizer);
            scaler.update();
          }
          EXPECT_EQ(count(warnings.text(), hundred_skips), 1U);
          EXPECT_EQ(count(warnings.text(), not_cleared), cleared == 0 ? 1U : 0U);
        }
      }
    }
  }
}

TEST(GradScalerLimits, AreRoundedToFp32SoThatAScaleThereCanBeLoadedAgain) {
  for (const double floor : {0.7, 0.1, 1e-4}) {
    GradScaler scaler({.init_scale = 1., .min_scale = floor, .at_min_scale = AtLimit::keep_going});
    scaler.scale(torch::ones({}));
    for (int i = 0; i < 20; ++i) iterate(scaler, true);
    EXPECT_EQ(scaler.get_scale(), static_cast<float>(floor));
    EXPECT_EQ(scaler.get_scale(), scaler.scale_tensor().item<double>());
    const auto state = scaler.state_dict();
    EXPECT_NO_THROW(scaler.load_state_dict(state)) << floor;
    EXPECT_NO_THROW(scaler.update(scaler.get_scale())) << floor;
  }
  EXPECT_NO_THROW(GradScaler({.init_scale = 0.1, .max_scale = 0.1}));
  EXPECT_NO_THROW(GradScaler({.init_scale = 1e-4, .min_scale = 1e-4}));
}
