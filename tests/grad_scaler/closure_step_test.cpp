// SPDX-License-Identifier: BSD-3-Clause
// Steps of optimizers that evaluate the loss by themselves.
#include <torchamp/closure_step.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>
#include <torchamp/predictive_scale.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "support/expect_error.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"

using torch::optim::LBFGS;
using torch::optim::LBFGSOptions;
using torch::optim::LBFGSParamState;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;
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

const LBFGSParamState* state_of(LBFGS& optimizer) {
  if (optimizer.state().empty()) return nullptr;
  return dynamic_cast<LBFGSParamState*>(optimizer.state().begin()->second.get());
}

LBFGSParamState deep_copy(const LBFGSParamState& state) {
  LBFGSParamState copy = state;
  for (at::Tensor* t : {&copy.d(), &copy.H_diag(), &copy.prev_flat_grad()}) *t = t->clone();
  for (auto* list : {&copy.old_dirs(), &copy.old_stps()}) {
    for (at::Tensor& t : *list) t = t.clone();
  }
  return copy;
}

/// (Their own operator== does not accept the undefined tensors that they hold.)
void expect_equal(const LBFGSParamState& a, const LBFGSParamState& b) {
  EXPECT_EQ(a.func_evals(), b.func_evals());
  EXPECT_EQ(a.n_iter(), b.n_iter());
  EXPECT_EQ(a.t(), b.t());
  EXPECT_EQ(a.prev_loss(), b.prev_loss());
  EXPECT_TRUE(at::equal(a.d(), b.d()));
  EXPECT_TRUE(at::equal(a.H_diag(), b.H_diag()));
  EXPECT_TRUE(at::equal(a.prev_flat_grad(), b.prev_flat_grad()));
  ASSERT_EQ(a.old_dirs().size(), b.old_dirs().size());
  for (std::size_t i = 0; i < a.old_dirs().size(); ++i) {
    EXPECT_TRUE(at::equal(a.old_dirs()[i], b.old_dirs()[i]));
    EXPECT_TRUE(at::equal(a.old_stps()[i], b.old_stps()[i]));
  }
}

}  // namespace

TEST(GradScalerClosure, LBFGSGoesWhereItGoesWithoutScaling) {
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
      const StepResult result = scaler.step(second, [&] { return scaled.loss(); });
      scaler.update();
      EXPECT_TRUE(result);
      EXPECT_EQ(result.attempts(), 1);
      EXPECT_EQ(result.value().item<float>(), loss.item<float>());
      EXPECT_TRUE(at::equal(scaled.w, plain.w)) << "powers of two change no bit";
    }
    EXPECT_EQ(scaled.evaluations, plain.evaluations) << "the first one is not made twice";
    EXPECT_EQ(scaler.get_scale(), 16384.);
    EXPECT_LT(scaled.loss().item<float>(), with_line_search ? 0.1 : 10.);
  }
}

TEST(GradScalerClosure, BacksOffAndRetriesUntilTheGradientsAreFinite) {
  Valley plain;
  Valley valley;
  valley.largest = 100.;
  LBFGS first = lbfgs(plain.w, true);
  LBFGS second = lbfgs(valley.w, true);
  GradScaler scaler({.init_scale = 1024.});
  const StepResult result = scaler.step(second, [&] { return valley.loss(); });
  EXPECT_TRUE(result);
  EXPECT_EQ(result.attempts(), 5) << "1024, 512, 256, 128, 64";
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

TEST(GradScalerClosure, SkipsAfterTheLastRetryAndLeavesEverythingAsItWas) {
  Valley valley;
  LBFGS optimizer = lbfgs(valley.w, true);
  GradScaler scaler({.init_scale = 1024.});
  const auto loss = [&] { return valley.loss(); };
  scaler.step(optimizer, loss);
  scaler.update();
  const at::Tensor before = valley.w.detach().clone();
  const LBFGSParamState state = deep_copy(*state_of(optimizer));
  valley.largest = 0.;
  valley.evaluations = 0;
  const StepResult result = scaler.step(optimizer, loss, 3);
  EXPECT_FALSE(result);
  EXPECT_EQ(result.attempts(), 4);
  EXPECT_EQ(valley.evaluations, 4);
  EXPECT_EQ(result.skips_in_a_row(), 1);
  EXPECT_FALSE(result.value().defined());
  EXPECT_TRUE(at::equal(valley.w, before));
  expect_equal(*state_of(optimizer), state);
  EXPECT_EQ(scaler.get_scale(), 128.);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 64.) << "update() backs off for the last attempt";
  EXPECT_EQ(scaler.skips_in_a_row(), 1);
}

TEST(GradScalerClosure, TriesNoLowerScaleForABadLossThatIsForgiven) {
  bool other_has_nans = false;  // another process
  for (const bool forgives : {true, false}) {
    GradScalerOptions options = GradScalerOptions::predictive();
    options.forgives_bad_losses = forgives;
    options.agree_found_inf = [&](at::Tensor& found_inf) {
      if (other_has_nans) found_inf.fill_(1.);
    };
    options.agree_largest = [&](at::Tensor& largest) {
      if (other_has_nans) largest.fill_(HUGE_VAL);
    };
    GradScaler scaler(options);
    Valley valley;
    LBFGS optimizer = lbfgs(valley.w, /*with_line_search=*/false);
    double factor = 1.;
    const auto step = [&] {
      valley.evaluations = 0;
      return scaler.step(optimizer, [&] { return valley.loss() * factor; });
    };
    EXPECT_TRUE(step());
    scaler.update();
    const double scale = scaler.get_scale();
    for (const bool own : {true, false}) {
      factor = own ? std::nan("") : 1.;
      other_has_nans = !own;
      const at::Tensor w = valley.w.detach().clone();
      EXPECT_EQ(step().attempts(), forgives ? 1 : 9) << own;
      EXPECT_EQ(valley.evaluations, forgives ? 1 : 9) << own;
      EXPECT_EQ(scaler.skips_in_a_row(), own ? 0 : 1);
      scaler.update();
      EXPECT_TRUE(at::equal(valley.w, w));
      if (forgives) {
        EXPECT_EQ(scaler.get_scale(), scale) << own;
      }
    }
    if (!forgives) {
      EXPECT_LT(scaler.get_scale(), scale);
    }
    other_has_nans = false;
  }
}

TEST(GradScalerClosure, AbandonsAStepInTheMiddleOfALineSearch) {
  // Every evaluation after the first `good` ones overflows.
  for (int good = 1; good < 12; ++good) {
    SCOPED_TRACE(good);
    Valley valley;
    LBFGS optimizer = lbfgs(valley.w, true);
    GradScaler scaler({.init_scale = 1024.});
    for (int i = 0; i < 3; ++i) {
      scaler.step(optimizer, [&] { return valley.loss(); });
      scaler.update();
    }
    const at::Tensor before = valley.w.detach().clone();
    const LBFGSParamState state = deep_copy(*state_of(optimizer));
    int left = good;
    const auto loss = [&] {
      valley.largest = left-- > 0 ? HUGE_VAL : 0.;
      return valley.loss();
    };
    const StepResult result = scaler.step(optimizer, loss, 2);
    scaler.update();
    if (result) {  // it needed no more evaluations
      EXPECT_GE(left, 0);
      continue;
    }
    EXPECT_EQ(left, -3) << "two retries";
    EXPECT_TRUE(at::equal(valley.w, before));
    expect_equal(*state_of(optimizer), state);
    EXPECT_FALSE(result.value().defined());
    left = 1000;
    EXPECT_TRUE(scaler.step(optimizer, loss));
  }
}

TEST(GradScalerClosure, ServesOptimizersThatEvaluateOnce) {
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  auto plain = sgd({w});
  PlainScaledSGD fused({w}, torch::optim::SGDOptions(1.));
  GradScaler scaler({.init_scale = 4.});
  EXPECT_TRUE(scaler.step(plain, [&] { return (w * 2).sum(); }));
  EXPECT_TRUE(scaler.step(fused, [&] { return (w * 3).sum(); }));
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
  EXPECT_TRUE(stepped(scaler.step(plain, constant)));
  EXPECT_TRUE(stepped(scaler.step(fused, function, 2)));
  EXPECT_TRUE(stepped(scaler.step(any, std::ref(constant))));
  EXPECT_TRUE(stepped(scaler.step(any, LossClosure(constant), 0)));
  using Step = StepResult (GradScaler::*)(torch::optim::Optimizer&, const LossClosure&, int64_t);
  const auto step = static_cast<Step>(&GradScaler::step);
  EXPECT_TRUE(stepped((scaler.*step)(any, function, 1)));
  EXPECT_EQ(w.item<float>(), -4.F);
  EXPECT_ERROR(scaler.step(plain, nullptr), "the closure is empty");
  EXPECT_ERROR(scaler.step(plain, {}), "the closure is empty");
}

TEST(GradScalerClosure, GivesUpAtTheFloorAndWithAFixedScale) {
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  auto optimizer = sgd({w});
  const auto loss = [&] { return (w * kInf).sum(); };
  GradScaler floor(
      {.init_scale = 4., .min_scale = 1., .at_min_scale = torchamp::AtLimit::keep_going});
  EXPECT_EQ(floor.step(optimizer, loss).attempts(), 3);
  GradScaler fixed(GradScalerOptions::fixed(4.));
  EXPECT_EQ(fixed.step(optimizer, loss).attempts(), 1);
  EXPECT_EQ(fixed.get_scale(), 4.);
}

TEST(GradScalerClosure, RetriesWhereOnlyTheDeviceKnowsTheScale) {
  Valley valley;
  valley.largest = 100.;
  LBFGS optimizer = lbfgs(valley.w, true);
  GradScaler scaler({.init_scale = 1024.});
  scaler.scale(torch::ones({}));
  move_to_device(scaler);
  const StepResult result = scaler.step(optimizer, [&] { return valley.loss(); });
  EXPECT_TRUE(result);
  EXPECT_EQ(result.attempts(), 5);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 64.);
  EXPECT_EQ(result.scale(), 64.);
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
  const StepResult result = scaler.step(second, [&] { return other.loss(); });
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
  EXPECT_TRUE(scaler.step(outer, [&] {
    scaler.scale(other.sum()).backward();
    scaler.step(inner);
    scaler.update();
    return w.sum();
  }));
  EXPECT_TRUE(scaler.is_stepped(outer));
  scaler.update();
}
