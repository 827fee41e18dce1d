// SPDX-License-Identifier: BSD-3-Clause
// Every order of five calls on one optimizer: the legal ones pass, each other fails at
// the first wrong call with its message, and a failed call changes nothing.
#include <torchamp/grad_scaler.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/optim.h>

#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/on_device.h"
#include "support/optimizers.h"

namespace {

enum class Call { scale, unscale, step, update, set_scale };
constexpr Call kCalls[] = {Call::scale, Call::unscale, Call::step, Call::update, Call::set_scale};
enum class Stage { unstarted, ready, unscaled, stepped };

const char* name(Call call) {
  static const char* const names[] = {"scale", "unscale_", "step", "update", "update(2)"};
  return names[static_cast<int>(call)];
}

/// The error of `call` in `stage`, or nothing if it is legal; then `stage` is moved on.
std::string expected_error(Call call, Stage& stage) {
  if (call == Call::scale) {
    if (stage == Stage::unstarted) stage = Stage::ready;
    return "";
  }
  if (stage == Stage::unstarted) {
    const std::string who = call == Call::set_scale ? "update" : name(call);
    return "GradScaler::" + who +
           ": nothing has been scaled yet. Call scale(loss).backward() first.";
  }
  switch (call) {
    case Call::unscale:
      if (stage == Stage::unscaled) {
        return "GradScaler::unscale_: the gradients of this optimizer have been unscaled already. "
               "Call unscale_ once for each optimizer between two calls of update(). (If an "
               "exception "
               "came before update(), call discard(optimizer).)";
      }
      if (stage == Stage::stepped) {
        return "GradScaler::unscale_: this optimizer has been stepped already. Call unscale_ "
               "before "
               "step, and update() after it.";
      }
      stage = Stage::unscaled;
      return "";
    case Call::step:
      if (stage == Stage::stepped) {
        return "GradScaler::step: this optimizer has been stepped already. Call update() once all "
               "optimizers have been stepped. (If an exception came before update(), call "
               "discard(optimizer).)";
      }
      stage = Stage::stepped;
      return "";
    case Call::update:
      if (stage == Stage::ready) {
        return "GradScaler::update: no optimizer has been stepped or unscaled since the last "
               "update. "
               "Call step(optimizer) first, or update(new_scale) to set the scale.";
      }
      [[fallthrough]];
    default:
      stage = Stage::ready;
      return "";
  }
}

template <typename Optimizer>
struct Run {
  torchamp::GradScaler scaler{{.init_scale = 4.}};
  at::Tensor w = parameter_with(torch::full({2}, 4.));
  Optimizer optimizer{std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1.)};

  void make(Call call) {
    switch (call) {
      case Call::scale:
        scaler.scale(torch::ones({}));
        return;
      case Call::unscale:
        return scaler.unscale_(optimizer);
      case Call::step:
        scaler.step(optimizer);
        return;
      case Call::update:
        return scaler.update();
      case Call::set_scale:
        return scaler.update(2.);
    }
  }

  /// Whatever a caller can see.
  std::string seen() const {
    return c10::str(scaler.get_scale(), ' ', scaler.state_dict().growth_tracker, ' ',
                    scaler.skips_in_a_row(), ' ', scaler.is_unscaled(optimizer), ' ',
                    scaler.scale_tensor().defined(), ' ', w.detach(), w.grad());
  }
};

template <typename Optimizer>
void try_all_orders(std::size_t length) {
  std::size_t orders = 1;
  for (std::size_t i = 0; i < length; ++i) orders *= std::size(kCalls);
  for (std::size_t order = 0; order < orders; ++order) {
    Run<Optimizer> run;
    Stage stage = Stage::unstarted;
    std::string so_far;
    std::size_t rest = order;
    for (std::size_t i = 0; i < length; ++i, rest /= std::size(kCalls)) {
      const Call call = kCalls[rest % std::size(kCalls)];
      so_far += std::string(name(call)) + ' ';
      SCOPED_TRACE(so_far);
      const std::string error = expected_error(call, stage);
      if (error.empty()) {
        EXPECT_NO_THROW(run.make(call));
      } else {
        const std::string before = run.seen();
        EXPECT_ERROR(run.make(call), error);
        EXPECT_EQ(run.seen(), before);
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace

TEST(GradScalerStates, EveryOrderOfCallsOnAnOrdinaryOptimizer) {
  try_all_orders<torch::optim::SGD>(5);
}

TEST(GradScalerStates, EveryOrderOfCallsOnAScaledStepOptimizer) {
  try_all_orders<PlainScaledSGD>(5);
}

TEST(GradScalerStates, OptimizersAreApart) {
  torchamp::GradScaler scaler;
  scaler.scale(torch::ones({}));
  auto one = sgd({parameter_with(torch::ones({1}))});
  auto two = sgd({parameter_with(torch::ones({1}))});
  scaler.unscale_(one);
  scaler.step(two);
  EXPECT_ERROR(scaler.unscale_(two), "has been stepped already");
  scaler.step(one);
  EXPECT_ERROR(scaler.step(two), "has been stepped already");
  scaler.update();
  scaler.step(two);
  scaler.step(one);
}

TEST(GradScalerStates, TakesNoOptimizerForOneOfOtherParametersThatWasAtItsAddress) {
  const auto walk = [](auto kind) {
    using Stepper = typename decltype(kind)::type;
    torchamp::GradScaler scaler({.init_scale = 4.});
    scaler.scale(torch::ones({}));
    const torch::optim::SGDOptions options(1.);
    std::optional<Stepper> optimizer;
    const at::Tensor a = parameter_with(torch::full({1}, 4.));
    optimizer.emplace(std::vector<at::Tensor>{a}, options);
    scaler.unscale_(*optimizer);
    torchamp::clip_grad_norm_(scaler, *optimizer, 0.5);
    const at::Tensor b = parameter_with(torch::full({1}, 4.));
    optimizer.emplace(std::vector<at::Tensor>{b}, options);
    EXPECT_FALSE(scaler.is_unscaled(*optimizer));
    EXPECT_FALSE(scaler.found_inf(*optimizer).defined());
    EXPECT_EQ(torchamp::clip_grad_norm_(scaler, *optimizer, 100.).template item<float>(), 1.F);
    scaler.step(*optimizer);
    EXPECT_EQ(b.item<float>(), -1.F);
    const at::Tensor c = parameter_with(torch::full({1}, 4.));
    optimizer.emplace(std::vector<at::Tensor>{c}, options);
    scaler.step(*optimizer);
    EXPECT_EQ(c.item<float>(), -1.F) << "this one has not stepped yet";
    scaler.update();
  };
  walk(std::type_identity<torchamp::FusedSGD>());
  walk(std::type_identity<torch::optim::SGD>());
}

TEST(GradScalerStates, DistinguishesOptimizersThatShareParameters) {
  torchamp::GradScaler scaler({.init_scale = 4.});
  scaler.scale(torch::ones({}));
  const at::Tensor w = parameter_with(torch::full({1}, 4.));
  torch::optim::SGD one({w}, torch::optim::SGDOptions(1.));
  torch::optim::SGD two({w}, torch::optim::SGDOptions(1.));
  scaler.unscale_(one);
  EXPECT_TRUE(scaler.is_unscaled(one));
  EXPECT_FALSE(scaler.is_unscaled(two));
}

TEST(GradScalerStates, KnowsAnOptimizerThatWasMovedOrGivenOtherStates) {
  torchamp::GradScaler scaler({.init_scale = 4.});
  scaler.scale(torch::ones({}));
  const at::Tensor w = parameter_with(torch::full({1}, 4.));
  torchamp::FusedSGD first({w}, torch::optim::SGDOptions(1.));
  scaler.unscale_(first);
  torchamp::FusedSGD second = std::move(first);
  EXPECT_TRUE(scaler.is_unscaled(second));
  std::stringstream file;
  torch::save(static_cast<torch::optim::Optimizer&>(second), file);
  torch::load(static_cast<torch::optim::Optimizer&>(second), file);
  EXPECT_TRUE(scaler.is_unscaled(second));
  scaler.step(second);
  EXPECT_EQ(w.item<float>(), -1.F);
}

TEST(GradScalerStates, AStepThatThrewMayBeRepeated) {
  struct Failing : torch::optim::SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      TORCH_CHECK(!fails, "out of luck");
      return SGD::step(closure);
    }
    bool fails = true;
  };
  torchamp::GradScaler scaler({.init_scale = 4.});
  scaler.scale(torch::ones({}));
  const at::Tensor w = parameter_with(torch::full({1}, 4.));
  Failing optimizer({w}, torch::optim::SGDOptions(1.));
  EXPECT_ERROR(scaler.step(optimizer), "out of luck");
  EXPECT_TRUE(scaler.is_unscaled(optimizer));
  optimizer.fails = false;
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(w.item<float>(), -1.F) << "unscaled once";
}

TEST(GradScalerStates, AFusedStepThatThrewLooksAnewWhenItIsRepeated) {
  torchamp::GradScaler scaler({.init_scale = 1.});
  const at::Tensor w = parameter_with(torch::full({1}, std::numeric_limits<float>::infinity()));
  FailingScaledSgd optimizer({w}, torch::optim::SGDOptions(1.));
  scaler.scale(torch::ones({}));
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  optimizer.fails = false;
  w.mutable_grad() = torch::ones({1});
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(w.item<float>(), -1.F);
}

TEST(GradScalerStates, AMovedScalerGoesOn) {
  torchamp::GradScaler first({.init_scale = 4.});
  first.scale(torch::ones({}));
  auto optimizer = sgd({parameter_with(torch::ones({1}))});
  first.unscale_(optimizer);
  torchamp::GradScaler second = std::move(first);
  EXPECT_ERROR(second.unscale_(optimizer), "unscaled already");
  EXPECT_TRUE(second.step(optimizer));
  second.update();
}

// ---- Mistakes that are reported -----------------------------------------------------------------

TEST(GradScalerStates, TakesNoTensorThatItHasScaled) {
  torchamp::GradScaler scaler({.init_scale = 4.}), other({.init_scale = 8.});
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  const at::Tensor loss = w.sum();
  const at::Tensor scaled = scaler.scale(loss);
  EXPECT_ERROR(scaler.scale(scaled), "GradScaler::scale: this tensor has been scaled already");
  EXPECT_ERROR(scaler.scale({loss, scaled}), "has been scaled already");
  const std::vector<at::Tensor> several = scaler.scale({w * 2, w * 3});
  EXPECT_ERROR(scaler.scale(several[1]), "scaled already");
  scaler.update(2.);
  EXPECT_ERROR(scaler.scale(scaled), "has been scaled already");
  EXPECT_EQ(scaler.get_scale(), 2.);

  // No mistakes: the loss once more, another scaler's, and a scale of 1 for good.
  EXPECT_EQ(scaler.scale(loss).item<float>(), 2.F);
  EXPECT_EQ(other.scale(scaled).item<float>(), 32.F);
  torchamp::GradScaler unscaled({.init_scale = 1., .dynamic = false});
  EXPECT_EQ(unscaled.scale(unscaled.scale(loss)).item<float>(), 1.F);
  torchamp::GradScaler disabled({.enabled = false});
  EXPECT_EQ(disabled.scale(disabled.scale(loss)).item<float>(), 1.F);
  // A tensor at the address of a destroyed one.
  for (int i = 0; i < 100; ++i) EXPECT_EQ(scaler.scale(scaler.scale(loss) / 2).item<float>(), 2.F);
}

/// PyTorch's recipe: gradients of the scaled loss within the next loss.
TEST(GradScalerStates, TakesAGradientPenalty) {
  torchamp::GradScaler scaler({.init_scale = 1024.});
  const at::Tensor w = torch::full({1}, 3.F).requires_grad_();
  auto optimizer = sgd({w});
  for (int i = 0; i < 2; ++i) {
    optimizer.zero_grad();
    at::Tensor loss = w.pow(2).sum();
    const at::Tensor gradient =
        torch::autograd::grad({scaler.scale(loss)}, {w}, {}, true, true)[0] / scaler.get_scale();
    loss = loss + gradient.pow(2).sum();
    scaler.scale(loss).backward();
    const float before = w.item<float>();
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    EXPECT_FLOAT_EQ(w.item<float>(), before - 10 * before);
  }
}

TEST(GradScalerStates, HoldsNothingThatItHasScaled) {
  torchamp::GradScaler scaler;
  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> weak(
      scaler.scale(torch::ones({}, torch::requires_grad())).getIntrusivePtr());
  EXPECT_TRUE(weak.expired());
}

TEST(GradScalerStates, RefusesGradientsThatCameAfterUnscalingFoundNone) {
  for (const bool fused : {false, true}) {
    torchamp::GradScaler scaler({.init_scale = 4.});
    const at::Tensor w = torch::zeros({1}, torch::requires_grad());
    torch::optim::SGD plain({w}, torch::optim::SGDOptions(1.));
    PlainScaledSGD scaled({w}, torch::optim::SGDOptions(1.));
    torch::optim::Optimizer& optimizer =
        fused ? static_cast<torch::optim::Optimizer&>(scaled) : plain;
    scaler.scale(torch::ones({}));
    scaler.unscale_(optimizer);
    scaler.scale((w * 3).sum()).backward();
    EXPECT_ERROR(scaler.step(optimizer), "unscale_ found none at all");
    EXPECT_EQ(w.item<float>(), 0.F);
    scaler.discard(optimizer);
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_EQ(w.item<float>(), -3.F);
    scaler.update();
  }
}

TEST(GradScalerStates, DiscardsWhatItHasRecordedOfOneOptimizer) {
  torchamp::GradScaler scaler({.init_scale = 4., .growth_interval = 1});
  scaler.scale(torch::ones({}));
  const at::Tensor bad = parameter_with(torch::full({1}, std::numeric_limits<float>::infinity()));
  const at::Tensor good = parameter_with(torch::ones({1}));
  auto one = sgd({bad}), other = sgd({good});
  scaler.discard(one);
  scaler.unscale_(one);
  scaler.step(other);
  scaler.discard(one);
  EXPECT_FALSE(scaler.is_unscaled(one));
  EXPECT_TRUE(scaler.is_stepped(other));
  EXPECT_FALSE(scaler.found_inf(one).defined());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8.) << "the bad one's flag is gone";
  scaler.step(one);
  scaler.discard(one);
  EXPECT_ERROR(scaler.update(), "no optimizer has been stepped or unscaled since the last update");
  EXPECT_ERROR(scaler.update(), "optimizer.step() does not count");
}

TEST(GradScalerStates, CountsOneSkipForTwoBadOptimizersAndLetsResultsKeepTheirs) {
  torchamp::GradScaler scaler({.init_scale = 16.});
  scaler.scale(torch::ones({}));
  move_to_device(scaler);
  const auto inf = [] { return torch::full({1}, std::numeric_limits<float>::infinity()); };
  PlainScaledSGD one({parameter_with(inf())}, torch::optim::SGDOptions(1.));
  PlainScaledSGD other({parameter_with(inf())}, torch::optim::SGDOptions(1.));
  std::vector<torchamp::StepResult> results;
  for (int i = 0; i < 3; ++i) {
    results.push_back(scaler.step(one));
    scaler.step(other);
    scaler.update();
    EXPECT_EQ(scaler.skips_in_a_row(), i + 1);
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(results[i].scale(), 16. / (1 << i)) << "asked after later updates";
    EXPECT_EQ(results[i].skips_in_a_row(), i + 1);
  }
}
