// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/grad_scaler.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <limits>

#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"

using torchamp::GradScaler;
using torchamp::StepResult;

namespace {

struct Fixture {
  GradScaler scaler{{.init_scale = 4.}};
  at::Tensor w = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD plain{std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1.)};
  PlainScaledSGD fused{std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1.)};

  StepResult step(float gradient, bool with_fused = false) {
    scaler.scale(torch::ones({}));
    w.mutable_grad() = torch::full({1}, gradient);
    return with_fused ? scaler.step(fused) : scaler.step(plain);
  }
};

}  // namespace

TEST(StepResult, SaysWhetherTheOptimizerStepped) {
  for (const bool with_fused : {false, true}) {
    Fixture run;
    EXPECT_TRUE(run.step(1, with_fused));
    run.scaler.update();
    EXPECT_FALSE(run.step(kInf, with_fused));
    run.scaler.update();
  }
}

TEST(StepResult, KeepsTheAnswersOfItsStep) {
  for (const bool with_fused : {false, true}) {
    Fixture run;
    std::vector<StepResult> results;
    const float gradients[] = {1, kInf, kInf, 1, kInf};
    for (const float gradient : gradients) {
      results.push_back(run.step(gradient, with_fused));
      run.scaler.update();
    }
    const double scales[] = {4, 4, 2, 1, 1};
    const int64_t skips[] = {0, 1, 2, 0, 1};
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].stepped(), gradients[i] == 1);
      EXPECT_EQ(results[i].scale(), scales[i]);
      EXPECT_EQ(results[i].skips_in_a_row(), skips[i]);
      EXPECT_TRUE(results[i].had_gradients());
      EXPECT_TRUE(results[i].missing_gradients().empty());
      EXPECT_FALSE(results[i].value().defined());
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].found_inf().item<float>() != 0, gradients[i] != 1);
    }
    EXPECT_EQ(run.scaler.skips_in_a_row(), 1);
  }
}

TEST(StepResult, OutlivesTheScaler) {
  auto run = std::make_unique<Fixture>();
  const StepResult result = run->step(kInf, true);
  const StepResult copy = result;
  run.reset();
  EXPECT_FALSE(copy.stepped());
  EXPECT_EQ(result.scale(), 4.);
}

TEST(StepResult, HoldsWhatTheOptimizerReturned) {
  struct Returning : torch::optim::SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure) override { return torch::full({}, 7.); }
  };
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  Returning optimizer({parameter_with(torch::ones({1}))}, torch::optim::SGDOptions(1.));
  EXPECT_EQ(scaler.step(optimizer).value().item<float>(), 7.F);
}

TEST(StepResult, IsKeptThroughLaterUpdatesAfterAnIterationWithoutGradients) {
  Fixture run;
  GradScaler scaler({.init_scale = 4., .growth_interval = 1});
  scaler.scale(torch::ones({}));
  move_to_device(scaler);
  const StepResult empty = scaler.step(run.fused);
  scaler.update();
  for (int i = 0; i < 2; ++i) {
    scaler.scale(torch::ones({}));
    run.w.mutable_grad() = torch::full({1}, kInf);
    scaler.step(run.fused);
    scaler.update();
  }
  EXPECT_FALSE(empty.had_gradients());
  EXPECT_EQ(empty.scale(), 4.);
  EXPECT_EQ(empty.skips_in_a_row(), 0);
  EXPECT_EQ(scaler.get_scale(), 1.);
}
