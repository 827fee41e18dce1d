// SPDX-License-Identifier: BSD-3-Clause
// Mistakes around an accumulation: each is reported. Correct programs cause no report.
#include <torchamp/accumulate.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/optimizers.h"
#include "support/warnings.h"

using testing::HasSubstr;
using testing::IsEmpty;
using torchamp::Accumulation;
using torchamp::GradScaler;

namespace {

/// With LibTorch's SGD, and with torchamp's.
class AccumulationMistakes : public testing::TestWithParam<bool> {
 protected:
  at::Tensor w = leaf({3}), v = leaf({3});
  std::unique_ptr<torch::optim::Optimizer> optimizer = plain_or_fused_sgd({w, v}, GetParam(), 1e-3);
  GradScaler scaler{{.init_scale = 64.}};
  Accumulation accumulation{scaler, *optimizer, 2};
  DroppingAccumulation safe{scaler, *optimizer};
  CollectedWarnings warnings;

  at::Tensor loss() const { return (w * w).sum() + v.sum(); }
};
INSTANTIATE_TEST_SUITE_P(Sgd, AccumulationMistakes, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Fused" : "LibTorchs");
});

TEST_P(AccumulationMistakes, ALossThatWasScaledAndDividedIsRefused) {
  constexpr const char* text = "computed from one that has been scaled already";
  EXPECT_ERROR(accumulation.backward(scaler.scale(loss()) / 2), text);
  EXPECT_ERROR(accumulation.backward((scaler.scale(loss()) + v.sum()) / 2), text);
  EXPECT_ERROR(accumulation.backward(scaler.scale({loss(), loss()})[1].mean() * 0.5), text);
  EXPECT_ERROR(safe.backward(scaler.scale(loss()) / 2), text);
  EXPECT_EQ(accumulation.pending(), 0);
  EXPECT_EQ(safe.pending(), 0);
  EXPECT_FALSE(accumulation.backward(loss()));
  EXPECT_TRUE(accumulation.backward(loss())->stepped());
}

TEST_P(AccumulationMistakes, ALossThatWasDividedByTheScaleAgainIsTaken) {
  accumulation.backward(scaler.scale(loss()) / scaler.get_scale());
  const at::Tensor x = leaf({3});
  const at::Tensor plain = (x * w).sum();
  const auto slopes = torch::autograd::grad({scaler.scale(plain)}, {x}, {}, true, true);
  EXPECT_TRUE(accumulation.backward(plain + (slopes[0] / 64.).pow(2).sum())->stepped());
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(AccumulationMistakes, APenaltyOnGradientsOfAScaledLossIsTaken) {
  const at::Tensor x = leaf({3});
  const at::Tensor plain = (x * w).sum();
  const auto slopes = torch::autograd::grad({scaler.scale(plain)}, {x}, {}, true, true);
  accumulation.backward(slopes[0].sum());
  EXPECT_TRUE(accumulation.backward(plain)->stepped());
}

TEST_P(AccumulationMistakes, GradientsThatAreZeroedWithinAWindowAreReportedOnce) {
  for (int i = 0; i < 4; ++i) {
    optimizer->zero_grad(/*set_to_none=*/false);
    accumulation.backward(loss());
    if (i == 0) {
      EXPECT_THAT(warnings.text(), IsEmpty());
    }
  }
  constexpr const char* text =
      "written to or replaced since the last call, for example by a clip, zero_grad(false)";
  EXPECT_THAT(warnings.text(), HasSubstr(text));
  EXPECT_EQ(warnings.text().find(text), warnings.text().rfind(text));
}

TEST(AccumulationMistakesOfPlainOptimizers, GradientsThatAreClippedWithinAWindowAreReportedOnce) {
  for (const double max_norm : {1e-3, HUGE_VAL}) {
    at::Tensor w = leaf({3});
    torch::optim::SGD optimizer({w}, 1e-3);
    GradScaler scaler({.init_scale = 64.});
    Accumulation accumulation(scaler, optimizer, 2);
    const CollectedWarnings warnings;
    for (int i = 0; i < 4; ++i) {
      accumulation.backward((w * w).sum());
      torchamp::clip_grad_norm_(optimizer, max_norm);
    }
    constexpr const char* text =
        "written to or replaced since the last call, for example by a clip";
    const auto at = warnings.text().find(text);
    EXPECT_EQ(at != std::string::npos, max_norm < 1.) << "a look at the norm is none";
    EXPECT_EQ(at, warnings.text().rfind(text));
  }
}

TEST_P(AccumulationMistakes, GradientsThatStayTheSameWithinAWindowAreNotReported) {
  for (int i = 0; i < 4; ++i) {
    accumulation.backward(loss());
    if (!w.grad().defined()) continue;
    const at::Tensor kept = w.grad();
    w.mutable_grad().reset();  // to look at another loss
    torch::autograd::grad({loss()}, {w});
    w.mutable_grad() = kept;
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(AccumulationMistakes, AClipBeforeTheStepOfSumsIsAnError) {
  for (int form = 0; form < 4; ++form) {
    safe.backward(loss());
    if (form == 0) torchamp::clip_grad_norm_(*optimizer, 1.);
    if (form == 1) torchamp::clip_grad_norm_({w, v}, 1.);
    if (form == 2) torchamp::clip_grad_value_({w, v}, 1.);
    if (form == 3) torchamp::clip_grad_norm_(scaler, *optimizer, 1.);
    EXPECT_THROW(safe.step(), c10::Error) << form;
    EXPECT_EQ(safe.pending(), 1);
    if (form == 3) {
      safe.discard();
    } else {
      EXPECT_ERROR(safe.step(), "a clip before this call found no gradients");
      EXPECT_TRUE(safe.step([&] { torchamp::clip_grad_norm_(*optimizer, 1.); }).stepped());
    }
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(AccumulationMistakes, AClipOfOthersBeforeTheStepOfSumsIsNone) {
  at::Tensor u = leaf({3});
  torchamp::clip_grad_norm_(*optimizer, 1.);  // before the window
  safe.backward(loss());
  torchamp::clip_grad_norm_({u}, 1.);
  EXPECT_TRUE(safe.step().stepped());
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(AccumulationMistakes, ABackwardOutsideOfTheAccumulationIsReportedOnce) {
  constexpr const char* text = "that do not come from backward() of the accumulation";
  for (const bool before_step : {false, true}) {
    DroppingAccumulation own(scaler, *optimizer);
    const CollectedWarnings of_own;
    for (int i = 0; i < 3; ++i) {
      own.backward(loss());
      scaler.scale(loss()).backward();
      if (before_step) own.step();
    }
    EXPECT_THAT(of_own.text(), HasSubstr(text));
    EXPECT_EQ(of_own.text().find(text), of_own.text().rfind(text));
    optimizer->zero_grad();
    own.discard();
  }
}

TEST_P(AccumulationMistakes, GradientsOfAnEarlierPhaseAndOfAnErrorAreNotReported) {
  loss().backward();
  safe.backward(loss());
  EXPECT_THROW(safe.step([] { throw std::runtime_error("mine"); }), std::runtime_error);
  safe.backward(loss());
  EXPECT_THROW(safe.step([] { throw std::runtime_error("mine"); }), std::runtime_error);
  EXPECT_EQ(safe.step().kept(), 2);
  safe.before_unscale([] { throw std::runtime_error("mine"); });
  EXPECT_THROW(safe.backward(loss()), std::runtime_error);
  safe.before_unscale(nullptr);
  safe.backward(loss());
  safe.step();
  EXPECT_THAT(warnings.text(), IsEmpty());
}

}  // namespace
