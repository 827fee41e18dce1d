// SPDX-License-Identifier: BSD-3-Clause
// Steps of optimizers that evaluate the loss by themselves.
#include <torchamp/closure_step.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <cmath>
#include <cstdint>
#include <functional>

#include "support/expect_error.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"

using torch::optim::LBFGS;
using torch::optim::LBFGSOptions;
using torchamp::GradScaler;
using torchamp::StepResult;

namespace {

/// Rosenbrock's function, whose gradient overflows, as an fp16 one would, if it is scaled too much.
struct Valley {
  at::Tensor w = torch::tensor({-1.5F, 2.F}).requires_grad_();
  double largest = HUGE_VAL;
  int evaluations = 0;

  at::Tensor loss() {
    ++evaluations;
    const at::Tensor x = w[0];
    const at::Tensor y = w[1];
    at::Tensor value = (1 - x).pow(2) + 100 * (y - x * x).pow(2);
    value.register_hook([this](const at::Tensor& gradient) {
      return at::where(gradient.abs() > largest, torch::full({}, kInf), gradient);
    });
    return value;
  }
};

LBFGS lbfgs(const at::Tensor& w, bool with_line_search) {
  LBFGSOptions options(with_line_search ? 1. : 0.01);
  options.max_iter(5);
  if (with_line_search) options.line_search_fn("strong_wolfe");
  return LBFGS({w}, options);
}

}  // namespace

TEST(GradScalerClosure, LBFGSTakesTheSameStepsAsWithoutScaling) {
  for (const bool with_line_search : {false, true}) {
    Valley plain;
    Valley scaled;
    LBFGS first = lbfgs(plain.w, with_line_search);
    LBFGS second = lbfgs(scaled.w, with_line_search);
    GradScaler scaler({.init_scale = 1024., .growth_interval = 2});
    for (int i = 0; i < 8; ++i) {
      const at::Tensor loss = first.step([&] {
        first.zero_grad();
        at::Tensor value = plain.loss();
        value.backward();
        return value;
      });
      const StepResult result = step(scaler, second, [&] { return scaled.loss(); });
      scaler.update();
      EXPECT_TRUE(result);
      EXPECT_EQ(result.value().item<float>(), loss.item<float>());
      EXPECT_TRUE(at::equal(scaled.w, plain.w)) << "powers of two change no bit";
    }
    EXPECT_EQ(scaled.evaluations, plain.evaluations) << "the first one is not made twice";
    EXPECT_EQ(scaler.get_scale(), 16384.);
    EXPECT_LT(scaled.loss().item<float>(), with_line_search ? 0.1 : 10.);
  }
}

TEST(GradScalerClosure, SkipsWhileTheGradientsOverflow) {
  for (const bool on_device : {false, true}) {
    Valley plain;
    Valley valley;
    valley.largest = 100.;
    LBFGS first = lbfgs(plain.w, true);
    LBFGS second = lbfgs(valley.w, true);
    GradScaler scaler({.init_scale = 1024.});
    scaler.scale(torch::ones({}));
    if (on_device) move_to_device(scaler);
    for (const double scale : {1024., 512., 256., 128.}) {
      const StepResult result = step(scaler, second, [&] { return valley.loss(); });
      EXPECT_FALSE(result);
      EXPECT_EQ(result.scale(), scale);
      EXPECT_FALSE(result.value().defined());
      EXPECT_TRUE(second.state().empty()) << "the optimizer has not begun";
      EXPECT_TRUE(at::equal(valley.w, plain.w));
      scaler.update();
    }
    EXPECT_EQ(valley.evaluations, 4);
    EXPECT_EQ(scaler.skips_in_a_row(), 4);
    const StepResult result = step(scaler, second, [&] { return valley.loss(); });
    EXPECT_TRUE(result);
    EXPECT_EQ(result.scale(), 64.);
    EXPECT_EQ(result.skips_in_a_row(), 0);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 64.);
    EXPECT_EQ(scaler.state_dict().growth_tracker, 1);
    first.step([&] {
      first.zero_grad();
      at::Tensor value = plain.loss();
      value.backward();
      return value;
    });
    EXPECT_TRUE(at::equal(valley.w, plain.w));
  }
}

TEST(GradScalerClosure, RestoresParametersIfALineSearchOverflows) {
  // Every evaluation after the first `good` ones overflows.
  int skips = 0;
  for (int good = 1; good < 12; ++good) {
    SCOPED_TRACE(good);
    Valley valley;
    LBFGS optimizer = lbfgs(valley.w, true);
    GradScaler scaler({.init_scale = 1024.});
    for (int i = 0; i < 3; ++i) {
      step(scaler, optimizer, [&] { return valley.loss(); });
      scaler.update();
    }
    const at::Tensor before = valley.w.detach().clone();
    int left = good;
    const auto loss = [&] {
      valley.largest = left-- > 0 ? HUGE_VAL : 0.;
      return valley.loss();
    };
    const StepResult result = step(scaler, optimizer, loss);
    scaler.update();
    if (result) {  // it needed no more evaluations
      EXPECT_GE(left, 0);
      continue;
    }
    ++skips;
    EXPECT_EQ(left, -1);
    EXPECT_TRUE(at::equal(valley.w, before));
    EXPECT_FALSE(result.value().defined());
    EXPECT_EQ(scaler.get_scale(), 512.);
    left = 1000;
    EXPECT_TRUE(step(scaler, optimizer, loss));
    EXPECT_FALSE(at::equal(valley.w, before));
  }
  EXPECT_GT(skips, 2);
}

TEST(GradScalerClosure, ServesOptimizersThatEvaluateOnce) {
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  auto plain = sgd({w});
  PlainScaledSGD fused({w}, torch::optim::SGDOptions(1.));
  GradScaler scaler({.init_scale = 4.});
  EXPECT_TRUE(step(scaler, plain, [&] { return (w * 2).sum(); }));
  EXPECT_TRUE(step(scaler, fused, [&] { return (w * 3).sum(); }));
  EXPECT_EQ(fused.scaled_steps, 0) << "the gradients have been unscaled and checked";
  scaler.update();
  EXPECT_EQ(w.item<float>(), -4.F);
}

TEST(GradScalerClosure, TakesEveryClosureAndOptimizerThatTakeEachOther) {
  using LossClosure = torch::optim::Optimizer::LossClosure;
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  auto plain = sgd({w});
  torchamp::FusedSGD fused({w}, torchamp::FusedSGD::Options(1.));
  torch::optim::Optimizer& any = plain;
  const auto constant = [w] { return w.sum(); };
  const LossClosure function = constant;
  GradScaler scaler({.init_scale = 4.});
  const auto stepped = [&](const StepResult& result) {
    scaler.update();
    return result.stepped();
  };
  EXPECT_TRUE(stepped(step(scaler, plain, constant)));
  EXPECT_TRUE(stepped(step(scaler, fused, function)));
  EXPECT_TRUE(stepped(step(scaler, any, std::ref(constant))));
  EXPECT_TRUE(stepped(step(scaler, any, LossClosure(constant))));
  using Step = StepResult (*)(GradScaler&, torch::optim::Optimizer&, const LossClosure&);
  const Step function_of_three = &torchamp::step;
  EXPECT_TRUE(stepped(function_of_three(scaler, any, function)));
  EXPECT_EQ(w.item<float>(), -4.F);
  EXPECT_ERROR(step(scaler, plain, nullptr), "the closure is empty");
  EXPECT_ERROR(step(scaler, plain, {}), "the closure is empty");
}

TEST(GradScalerClosure, IsTheOptimizersOwnWhenDisabled) {
  Valley plain;
  Valley other;
  LBFGS first = lbfgs(plain.w, true);
  LBFGS second = lbfgs(other.w, true);
  GradScaler scaler({.enabled = false});
  first.step([&] {
    first.zero_grad();
    at::Tensor value = plain.loss();
    value.backward();
    return value;
  });
  const StepResult result = step(scaler, second, [&] { return other.loss(); });
  EXPECT_TRUE(result);
  EXPECT_TRUE(result.value().defined());
  EXPECT_TRUE(at::equal(plain.w, other.w));
}

TEST(GradScalerClosure, OutlivesAClosureThatEndsAnotherIteration) {
  GradScaler scaler;
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  const at::Tensor other = torch::ones({1}, torch::requires_grad());
  torch::optim::SGD outer({w}, 1.);
  torch::optim::SGD inner({other}, 1.);
  EXPECT_TRUE(step(scaler, outer, [&] {
    scaler.scale(other.sum()).backward();
    scaler.step(inner);
    scaler.update();
    return w.sum();
  }));
  EXPECT_TRUE(scaler.is_stepped(outer));
  scaler.update();
}
