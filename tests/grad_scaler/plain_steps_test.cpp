// SPDX-License-Identifier: BSD-3-Clause
// Optimizers that step without the scaler, and losses of fp64 weights, are reported.
#include <torchamp/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/devices.h"
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

TEST(StepWithoutTheScaler, IsReportedOnceInTheFirstIterations) {
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

/// A critic through which the actor's loss goes, with its own loss and optimizer.
TEST(StepWithoutTheScaler, IsNotReportedIfTheGradientsAreTheOptimizersOwn) {
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

TEST(StepWithoutTheScaler, IsNotReportedForAnAdversarialInputOrOfFrozenWeights) {
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

TEST(StepWithoutTheScaler, IsNotReportedForOneInputThatTwoLossesHave) {
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

/// The generator's gradients alone are wanted, while the critic has its own from before.
TEST(StepWithoutTheScaler, IsNotReportedForGradientsThatTheScaledBackwardHasLeftAlone) {
  for (const bool by_backward : {false, true}) {
    TwoModels models;
    torch::optim::Adam critic(models.second->parameters(), torch::optim::AdamOptions(1e-3));
    const auto parameters = models.first->parameters();
    const CollectedWarnings warnings;
    for (int i = 0; i < 3; ++i) {
      models.right.zero_grad();
      critic.zero_grad();
      models.second(models.x).pow(2).mean().backward();
      const at::Tensor scaled = models.scaler.scale(models.loss());
      if (by_backward) {
        scaled.backward({}, /*retain_graph=*/false, /*create_graph=*/false, parameters);
      } else {
        const auto gradients = torch::autograd::grad({scaled}, parameters);
        for (std::size_t p = 0; p < 2; ++p) {
          at::Tensor(parameters[p]).mutable_grad() = gradients[p].clone();
        }
      }
      critic.step();
      models.scaler.step(models.right);
      models.scaler.update();
    }
    EXPECT_THAT(warnings.text(), IsEmpty());
  }
}

TEST(StepWithoutTheScaler, IsNotReportedForSeveralAdversarialInputs) {
  TwoModels models;
  const CollectedWarnings warnings;
  for (int i = 0; i < 3; ++i) {
    at::Tensor inputs[] = {torch::randn({2, 4}).requires_grad_(),
                           torch::randn({2, 4}).requires_grad_()};
    models.right.zero_grad();
    models.scaler.scale(models.first(inputs[0] + inputs[1]).pow(2).mean()).backward();
    for (at::Tensor& input : inputs) {
      const torch::NoGradGuard no_grad;
      input.add_(input.grad().sign(), 1e-2);
    }
    models.scaler.step(models.right);
    models.scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

/// Each has its part of the batch; the second's gradients are averaged into the first's.
TEST(StepWithoutTheScaler, IsNotReportedForReplicasThatAreCopiedFromTheModel) {
  TwoModels models;
  const CollectedWarnings warnings;
  for (int i = 0; i < 3; ++i) {
    models.right.zero_grad();
    models.second->zero_grad();
    models.scaler.scale(models.first(models.x).pow(2).mean()).backward();
    models.scaler.scale(models.second(models.x).pow(2).mean()).backward();
    for (std::size_t p = 0; p < 2; ++p) {
      models.first->parameters()[p].mutable_grad().add_(models.second->parameters()[p].grad());
    }
    models.scaler.step(models.right);
    const torch::NoGradGuard no_grad;
    for (std::size_t p = 0; p < 2; ++p) {
      models.second->parameters()[p].copy_(models.first->parameters()[p]);
    }
    models.scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST(StepWithoutTheScaler, IsNotReportedForATeacherThatAveragesWeightsAndIsNotDetached) {
  TwoModels models;
  const CollectedWarnings warnings;
  for (int i = 0; i < 3; ++i) {
    models.right.zero_grad();
    const at::Tensor distance = models.first(models.x) - models.second(models.x);
    models.scaler.scale(distance.pow(2).mean()).backward();
    models.scaler.step(models.right);
    const torch::NoGradGuard no_grad;
    for (std::size_t p = 0; p < 2; ++p) {
      models.second->parameters()[p].lerp_(models.first->parameters()[p], 0.1);
    }
    models.scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

/// A generator before its discriminator, whose gradients are cleared in between.
TEST(StepWithoutTheScaler, IsReportedIfTheGradientsAreClearedWithinTheIteration) {
  TwoModels models;
  torch::optim::Adam wrong(models.second->parameters(), torch::optim::AdamOptions(1e-3));
  const CollectedWarnings warnings;
  for (int i = 0; i < 3; ++i) {
    models.right.zero_grad();
    models.scaler.scale(models.loss()).backward();
    models.scaler.step(models.right);
    wrong.zero_grad();
    models.scaler.scale(models.second(models.x).pow(2).mean()).backward();
    wrong.step();
    models.scaler.update();
  }
  EXPECT_THAT(warnings.text(), HasSubstr(beside));
}

/// A critic that is clamped once the generator's loss has gone through it, with its own scaler or
/// none, with updates at once or together.
TEST(StepWithoutTheScaler, IsNotReportedForWeightsThatAScalerHasSteppedElsewhere) {
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
TEST(StepWithoutTheScaler, IsNotReportedForCopiesOfTheScalersWeights) {
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

/// A temperature, for example, with a model in fp32.
TEST(ANumberInFp64, IsNotReportedAsAModel) {
  const at::Tensor number = torch::ones({1}, torch::kDouble).requires_grad_();
  GradScaler scaler;
  const CollectedWarnings warnings;
  scaler.scale((number * 3).sum()).backward();
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST(AModelInFp64, IsReportedOnceByAScalerOfItsLoss) {
  torch::nn::Linear model(2, 2), mixed(2, 2);
  model->to(torch::kDouble);
  const at::Tensor x = torch::randn({3, 2}, torch::kDouble);
  GradScaler scaler;
  const CollectedWarnings warnings;
  scaler.scale(model(x).pow(2).mean() + mixed(x.to(torch::kFloat)).pow(2).mean()).backward();
  scaler.update(64.);
  EXPECT_THAT(warnings.text(), IsEmpty());
  for (int i = 0; i < 2; ++i) {
    scaler.scale(model(x).pow(2).mean()).backward();
    scaler.update(64.);
  }
  const std::string text = warnings.text(), told = "is fp64, which a region never casts";
  EXPECT_THAT(text, HasSubstr(told));
  EXPECT_EQ(text.find(told), text.rfind(told));
}

/// A part that needs fp64, with its own loss.
TEST(APartInFp64, IsNotReportedAsAModelIfAnotherLossIsOfFp32) {
  for (const bool first : {false, true}) {
    torch::nn::Linear part(2, 2), model(2, 2);
    part->to(torch::kDouble);
    const at::Tensor x = torch::randn({3, 2});
    GradScaler scaler;
    const CollectedWarnings warnings;
    for (int i = 0; i < 2; ++i) {
      if (first) scaler.scale(part(x.to(torch::kDouble)).pow(2).mean()).backward();
      scaler.scale(model(x).pow(2).mean()).backward();
      if (!first) scaler.scale(part(x.to(torch::kDouble)).pow(2).mean()).backward();
      scaler.update(64.);
    }
    EXPECT_THAT(warnings.text(), IsEmpty());
  }
}

// ---- Steps of unscaled gradients ----------------------------------------------------------------

namespace {

constexpr const char* with_infs = "has stepped with infs or NaNs, and weights are inf or NaN now";

/// A model whose gradients are inf in the second of three iterations.
class StepAfterUnscale : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<torch::optim::Optimizer> adam() const {
    const torch::optim::AdamOptions options(1e-3);
    if (GetParam()) return std::make_unique<torchamp::FusedAdam>(model->parameters(), options);
    return std::make_unique<torch::optim::Adam>(model->parameters(), options);
  }
  /// `step` is called after unscale_.
  template <class Step>
  std::string warnings_of(const Step& step) {
    const CollectedWarnings warnings;
    for (int i = 0; i < 4; ++i) {
      optimizer->zero_grad();
      const double factor = i == 1 ? HUGE_VAL : 1.;
      scaler.scale(model(x).pow(2).mean() * factor).backward();
      step();
      scaler.update();
    }
    return warnings.text();
  }

  torch::nn::Linear model{4, 4};
  const at::Tensor x = torch::ones({2, 4});
  std::unique_ptr<torch::optim::Optimizer> optimizer = adam();
  GradScaler scaler{{.init_scale = 64.}};
};
INSTANTIATE_TEST_SUITE_P(Adam, StepAfterUnscale, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Fused" : "LibTorchs");
});

}  // namespace

TEST_P(StepAfterUnscale, IsReportedOnceIfItHasSteppedWithInfs) {
  const std::string text = warnings_of([&] {
    scaler.unscale_(*optimizer);
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.);
    optimizer->step();
  });
  EXPECT_THAT(text, HasSubstr(with_infs));
  EXPECT_EQ(text.find(with_infs), text.rfind(with_infs)) << "told once";
}

TEST_P(StepAfterUnscale, IsReportedForEachOptimizerOfAnIteration) {
  torch::nn::Linear other(4, 4);
  torch::optim::Adam right(other->parameters(), torch::optim::AdamOptions(1e-3));
  const auto step = [&](torch::optim::Optimizer& one) {
    scaler.unscale_(one);
    one.step();
  };
  for (const bool first : {false, true}) {
    scaler = GradScaler({.init_scale = 64.});
    model = torch::nn::Linear(4, 4);
    optimizer = adam();
    EXPECT_THAT(warnings_of([&] {
                  right.zero_grad();
                  scaler.scale(other(x).pow(2).mean()).backward();
                  if (first) step(right);
                  step(*optimizer);
                  if (!first) step(right);
                }),
                HasSubstr(with_infs));
  }
}

TEST_P(StepAfterUnscale, IsNotReportedForAProgramThatChecksFirst) {
  for (int form = 0; form < 4; ++form) {
    SCOPED_TRACE(form);
    EXPECT_THAT(warnings_of([&] {
                  scaler.unscale_(*optimizer);
                  const double norm = model->weight.grad().norm().item<double>();
                  const bool bad = form == 0 ? scaler.found_inf(*optimizer).item<double>() != 0.
                                             : !std::isfinite(norm);
                  if (form == 2 && bad) model->reset_parameters();  // an older state, say
                  if (form == 3 && bad) {
                    for (at::Tensor& parameter : model->parameters()) {
                      parameter.mutable_grad().nan_to_num_(0., 0., 0.);
                    }
                  }
                  if (!bad || form == 3) optimizer->step();
                }),
                IsEmpty());
  }
}

TEST_P(StepAfterUnscale, IsNotReportedForWeightsThatWereNotFiniteBefore) {
  EXPECT_THAT(warnings_of([&] {
                scaler.unscale_(*optimizer);
                const bool bad = scaler.found_inf(*optimizer).item<double>() != 0.;
                if (bad) return;
                const torch::NoGradGuard no_grad;
                // An explosion: all later gradients are NaN.
                model->weight.fill_(std::numeric_limits<double>::quiet_NaN());
              }),
              IsEmpty());
}

namespace {

using StepAfterUnscaleOn = testing::TestWithParam<at::DeviceType>;
INSTANTIATE_TEST_SUITE_P(Devices, StepAfterUnscaleOn, all_devices(), device_name);

}  // namespace

/// What a device has found arrives later, so the host looks again in the iterations that follow.
TEST(StepAfterUnscale, ThatIsReportedByAnExceptionLeavesTheScalerReadyForTheNextIteration) {
  const at::Tensor weight = torch::ones({4}).requires_grad_();
  torchamp::FusedAdam optimizer({weight}, torch::optim::AdamOptions(1e-3));
  GradScaler scaler({.init_scale = 64.});
  const ThrownWarnings warnings;
  for (const double slope : {HUGE_VAL, 1., 1.}) {
    optimizer.zero_grad();
    scaler.scale((weight * slope).sum()).backward();
    scaler.unscale_(optimizer);
    optimizer.step();
    if (slope == HUGE_VAL) {
      EXPECT_THROW(scaler.update(), std::runtime_error);
    } else {
      scaler.update();
    }
  }
  EXPECT_EQ(scaler.get_scale(), 32.);
}

TEST_P(StepAfterUnscaleOn, IsReportedWhenTheInfHasArrived) {
  SKIP_WITHOUT(GetParam());
  const at::Tensor weight = torch::ones({4}, GetParam()).requires_grad_();
  torchamp::FusedAdam optimizer({weight}, torch::optim::AdamOptions(1e-3));
  GradScaler scaler({.init_scale = 64.});
  const CollectedWarnings warnings;
  for (int i = 0; i < 4; ++i) {
    if (i < 2) {
      EXPECT_THAT(warnings.text(), IsEmpty());
    }
    optimizer.zero_grad();
    scaler.scale((weight * (i == 1 ? HUGE_VAL : 1.)).sum()).backward();
    scaler.unscale_(optimizer);
    optimizer.step();
    scaler.update();
    (void)weight.cpu();  // waits
  }
  EXPECT_THAT(warnings.text(), HasSubstr(with_infs));
}

// ---- Warnings that the program's handler throws -------------------------------------------------

TEST(AWarningThatThrows, LeavesAStepWithoutGradientsComplete) {
  for (const bool fused : {false, true}) {
    const at::Tensor weight = torch::ones({4}).requires_grad_();
    std::unique_ptr<torch::optim::Optimizer> optimizer =
        std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{weight}, 0.5);
    if (fused) {
      optimizer = std::make_unique<torchamp::FusedSGD>(std::vector<at::Tensor>{weight},
                                                       torch::optim::SGDOptions(0.5));
    }
    GradScaler scaler({.init_scale = 64.});
    scaler.scale(torch::ones({}));
    {
      const ThrownWarnings warnings;
      EXPECT_THROW(scaler.step(*optimizer), std::runtime_error);
    }
    EXPECT_TRUE(scaler.is_stepped(*optimizer));
    scaler.update();
    scaler.scale(weight.sum()).backward();
    EXPECT_TRUE(scaler.step(*optimizer));
    scaler.update();
    EXPECT_EQ(weight[0].item<float>(), 0.5F);
  }
}

TEST(ALimitThatThrows, LeavesTheUpdateComplete) {
  const at::Tensor weight = torch::ones({4}).requires_grad_();
  torchamp::FusedSGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  GradScaler scaler(
      {.init_scale = 64.,
       .max_skips_in_a_row = 1,
       .at_max_skips = torchamp::AtLimit::call,
       .on_limit = [](const torchamp::ScaleLimit&) { throw std::runtime_error("mine"); }});
  scaler.scale((weight * HUGE_VAL).sum()).backward();
  scaler.step(optimizer);
  EXPECT_THROW(scaler.update(), std::runtime_error);
  EXPECT_EQ(scaler.get_scale(), 32.);
  EXPECT_FALSE(scaler.is_stepped(optimizer));
  optimizer.zero_grad();
  scaler.scale(weight.sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
}
