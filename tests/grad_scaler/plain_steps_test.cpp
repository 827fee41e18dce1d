// SPDX-License-Identifier: BSD-3-Clause
// Optimizers that step beside the scaler, and losses of fp64 weights, are told.
#include <torchamp/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <memory>
#include <string>

#include "support/warnings.h"

namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using torchamp::GradScaler;

constexpr const char* beside = "optimizer.step() steps with gradients that are too large";

/// Two models on one input, the first stepped by a scaler.
struct TwoModels {
  torch::nn::Linear first{4, 4}, second{4, 4};
  const at::Tensor x = torch::randn({2, 4});
  torchamp::FusedAdam right{first->parameters(), torch::optim::AdamOptions(1e-3)};
  GradScaler scaler{{.init_scale = 64.}};

  at::Tensor loss() { return second(first(x)).pow(2).mean(); }
};

}  // namespace

TEST(StepBesideAScaler, IsToldOnceInTheFirstIterations) {
  for (const bool fused : {false, true}) {
    for (const int wrong_from : {0, 1}) {
      SCOPED_TRACE(c10::str(fused ? "fused" : "LibTorch's", ", from iteration ", wrong_from));
      TwoModels models;
      const torch::optim::AdamOptions options(1e-3);
      std::unique_ptr<torch::optim::Optimizer> wrong;
      if (fused) {
        wrong = std::make_unique<torchamp::FusedAdam>(models.second->parameters(), options);
      } else {
        wrong = std::make_unique<torch::optim::Adam>(models.second->parameters(), options);
      }
      const CollectedWarnings warnings;
      for (int i = 0; i < 4; ++i) {
        models.right.zero_grad();
        wrong->zero_grad();
        models.scaler.scale(models.loss()).backward();
        if (i >= wrong_from) wrong->step();
        models.scaler.step(models.right);
        models.scaler.update();
      }
      const std::string text = warnings.text();
      EXPECT_THAT(text, HasSubstr(beside));
      EXPECT_EQ(text.find(beside), text.rfind(beside)) << "told once";
    }
  }
}

/// A critic through which the actor's loss goes, with a loss and an optimizer of its own.
TEST(StepBesideAScaler, IsNotToldWhereTheGradientsAreTheOptimizersOwn) {
  for (const bool first : {false, true}) {
    TwoModels models;
    torch::optim::Adam critic(models.second->parameters(), torch::optim::AdamOptions(1e-3));
    const auto step_critic = [&] {
      critic.zero_grad();
      models.second(models.x).pow(2).mean().backward();
      critic.step();
    };
    const CollectedWarnings warnings;
    for (int i = 0; i < 3; ++i) {
      models.right.zero_grad();
      if (first) step_critic();
      models.scaler.scale(models.loss()).backward();
      models.scaler.step(models.right);
      if (!first) step_critic();
      models.scaler.update();
    }
    EXPECT_THAT(warnings.text(), IsEmpty());
  }
}

TEST(StepBesideAScaler, IsNotToldOfAnAdversarialInputOrOfFrozenWeights) {
  TwoModels models;
  at::Tensor input = torch::randn({2, 4}).requires_grad_();
  const CollectedWarnings warnings;
  for (int i = 0; i < 3; ++i) {
    models.right.zero_grad();
    models.scaler.scale(models.second(models.first(input)).pow(2).mean()).backward();
    {
      const torch::NoGradGuard no_grad;
      input.add_(input.grad().sign(), 1e-2);
    }
    models.scaler.step(models.right);  // the second model is never stepped
    models.scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST(StepBesideAScaler, IsNotToldOfOneInputThatTwoLossesHave) {
  TwoModels models;
  at::Tensor input = torch::randn({2, 4}).requires_grad_();
  const CollectedWarnings warnings;
  for (int i = 0; i < 3; ++i) {
    models.right.zero_grad();
    models.scaler.scale(models.first(input).pow(2).mean()).backward();
    models.scaler.scale(models.first(input).abs().mean()).backward();
    {
      const torch::NoGradGuard no_grad;
      input.add_(input.grad().sign(), 1e-2);
    }
    models.scaler.step(models.right);
    models.scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

/// A critic that is clamped once the generator's loss has gone through it, with a scaler of its own
/// or none, with updates at once or together.
TEST(StepBesideAScaler, IsNotToldOfWeightsThatAScalerHasSteppedElsewhere) {
  for (const bool has_scaler : {false, true}) {
    for (const bool together : {false, true}) {
      SCOPED_TRACE(c10::str("a scaler each: ", has_scaler, ", updates together: ", together));
      TwoModels models;
      torch::optim::Adam of_critic(models.second->parameters(), torch::optim::AdamOptions(1e-3));
      GradScaler own({.init_scale = 8.});
      GradScaler& judge = has_scaler ? own : models.scaler;
      const CollectedWarnings warnings;
      for (int i = 0; i < 3; ++i) {
        of_critic.zero_grad();
        judge.scale(models.second(models.first(models.x).detach()).mean()).backward();
        judge.step(of_critic);
        if (!together) judge.update();
        models.right.zero_grad();
        models.scaler.scale(models.loss()).backward();
        models.scaler.step(models.right);
        const torch::NoGradGuard no_grad;
        for (at::Tensor& weight : models.second->parameters()) weight.clamp_(-0.01, 0.01);
        models.scaler.update();
        if (together && has_scaler) judge.update();
      }
      EXPECT_THAT(warnings.text(), IsEmpty());
    }
  }
}

/// Masters by hand, or a model that several threads share: the same gradients, copies, in fp64.
TEST(StepBesideAScaler, IsNotToldOfWeightsThatAreCopiedFromThoseTheScalerSteps) {
  for (int form = 0; form < 3; ++form) {
    SCOPED_TRACE(form);
    TwoModels models;
    torch::nn::Linear local = models.second;
    if (form == 2) models.first->to(torch::kDouble);
    const CollectedWarnings warnings;
    for (int i = 0; i < 3; ++i) {
      local->zero_grad();
      models.scaler.scale(local(models.x).pow(2).mean()).backward();
      for (std::size_t p = 0; p < 2; ++p) {
        at::Tensor weight = models.first->parameters()[p];
        const at::Tensor gradient = local->parameters()[p].grad();
        weight.mutable_grad() = form == 0 ? gradient : gradient.clone().to(weight.scalar_type());
      }
      models.scaler.step(models.right);
      const torch::NoGradGuard no_grad;
      for (std::size_t p = 0; p < 2; ++p) {
        local->parameters()[p].copy_(models.first->parameters()[p]);
      }
      models.scaler.update();
    }
    EXPECT_THAT(warnings.text(), IsEmpty());
  }
}

/// A temperature, say, beside a model in fp32.
TEST(ANumberInFp64, IsNotToldAsAModel) {
  const at::Tensor number = torch::ones({1}, torch::kDouble).requires_grad_();
  GradScaler scaler;
  const CollectedWarnings warnings;
  scaler.scale((number * 3).sum()).backward();
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST(AModelInFp64, IsToldOnceBySomethingThatScalesItsLoss) {
  torch::nn::Linear model(2, 2), mixed(2, 2);
  model->to(torch::kDouble);
  const at::Tensor x = torch::randn({3, 2}, torch::kDouble);
  GradScaler scaler;
  const CollectedWarnings warnings;
  scaler.scale(model(x).pow(2).mean() + mixed(x.to(torch::kFloat)).pow(2).mean()).backward();
  EXPECT_THAT(warnings.text(), IsEmpty());
  for (int i = 0; i < 2; ++i) scaler.scale(model(x).pow(2).mean()).backward();
  const std::string text = warnings.text(), told = "is fp64, which a region never casts";
  EXPECT_THAT(text, HasSubstr(told));
  EXPECT_EQ(text.find(told), text.rfind(told));
}
