// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/grad_scaler.h>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/autocast.h>
#include <torchamp/optim.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"
#include "support/skips.h"
#include "support/tolerances.h"
#include "support/warnings.h"

using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::GradScalerState;

namespace {

struct Where {
  at::DeviceType device;
  bool rule_on_device;  // from the first scale() on
};

class GradScalerOn : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override { SKIP_WITHOUT(device()); }
  at::DeviceType device() const { return GetParam().device; }
  at::TensorOptions options() const { return at::TensorOptions(device()).dtype(at::kFloat); }
  at::Tensor number(double x) const { return at::full({}, x, options()); }
  at::Tensor tensor(std::vector<float> values) const { return torch::tensor(values).to(device()); }

  void start(GradScaler& scaler) const {
    scaler.scale(number(1));
    if (GetParam().rule_on_device && host_knows(scaler)) move_to_device(scaler);
  }

  /// One iteration in which the gradient of `optimizer`'s parameters is `gradient`, unscaled.
  void iterate(GradScaler& scaler, torch::optim::Optimizer& optimizer, double gradient) const {
    if (!scaler.scale_tensor().defined()) start(scaler);
    at::Tensor loss;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const at::Tensor term = (parameter * gradient).sum();
        loss = loss.defined() ? loss + term : term;
      }
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  }
};

}  // namespace

// ---- scale --------------------------------------------------------------------------------------

TEST_P(GradScalerOn, MultipliesByTheScale) {
  GradScaler scaler({.init_scale = 8.});
  expect_close(scaler.scale(tensor({1, -2, 3})), tensor({8, -16, 24}));
}

TEST_P(GradScalerOn, ScalesAHalfScalarInFp32AndKeepsOtherDtypes) {
  GradScaler scaler;
  EXPECT_EQ(scaler.scale(number(2).to(at::kHalf)).scalar_type(), at::kFloat);
  EXPECT_EQ(scaler.scale(number(2).to(at::kBFloat16)).scalar_type(), at::kFloat);
  EXPECT_EQ(scaler.scale(number(2).to(at::kDouble)).scalar_type(), at::kDouble);
  EXPECT_EQ(scaler.scale(number(2).to(at::kLong)).scalar_type(), at::kFloat);
  const at::Tensor row = scaler.scale(tensor({2, 3}).to(at::kHalf));
  EXPECT_EQ(row.scalar_type(), at::kHalf);
  EXPECT_TRUE(std::isinf(row[0].item<float>())) << "2 * 65536 is too large for fp16";
}

TEST_P(GradScalerOn, ScalesEachTensorOfAList) {
  GradScaler scaler({.init_scale = 2.});
  const std::vector<at::Tensor> scaled = scaler.scale({number(1), tensor({1, 2})});
  ASSERT_EQ(scaled.size(), 2U);
  expect_close(scaled[0], number(2));
  expect_close(scaled[1], tensor({2, 4}));
}

TEST(GradScaler, ScalesAnEmptyListToAnEmptyListAndStaysUnstarted) {
  GradScaler scaler;
  EXPECT_TRUE(scaler.scale(std::vector<at::Tensor>{}).empty());
  EXPECT_FALSE(scaler.scale_tensor().defined());
}

TEST(GradScaler, RefusesAnUndefinedTensor) {
  GradScaler scaler;
  EXPECT_ERROR(scaler.scale(at::Tensor()), "GradScaler::scale: the tensor is undefined");
  EXPECT_ERROR(scaler.scale({torch::ones({}), at::Tensor()}), "the tensor is undefined");
  EXPECT_FALSE(scaler.scale_tensor().defined());
}

TEST_P(GradScalerOn, KeepsTheScaleOnTheDeviceOfTheFirstTensor) {
  GradScaler scaler;
  start(scaler);
  const at::Tensor scale = scaler.scale_tensor();
  EXPECT_EQ(scale.device().type(), device());
  EXPECT_EQ(scale.scalar_type(), at::kFloat);
  EXPECT_EQ(scale.dim(), 0);
  scaler.scale(torch::ones({}));
  EXPECT_TRUE(scaler.scale_tensor().is_same(scale));
}

TEST_P(GradScalerOn, PassesTheScaleToTheGradients) {
  const at::Tensor w = tensor({1, 2}).requires_grad_();
  GradScaler scaler({.init_scale = 4.});
  scaler.scale((w * w).sum()).backward();
  expect_close(w.grad(), tensor({8, 16}));
}

TEST(GradScaler, RefusesBackwardThroughAScaleThatHasChangedSince) {
  GradScaler scaler;
  const at::Tensor w = torch::ones({}, torch::requires_grad());
  const at::Tensor loss = scaler.scale(w * w);
  scaler.update(2.);
  EXPECT_ERROR(loss.backward(), "modified by an inplace operation");
}

// ---- unscale_ -----------------------------------------------------------------------------------

TEST_P(GradScalerOn, UnscalesEveryGroupAndDtypeInPlace) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kFloat, at::kComplexFloat}) {
    gradients.push_back(tensor({4, -8}).to(dtype));
    parameters.push_back(parameter_with(gradients.back()));
  }
  torch::optim::SGD optimizer(
      {{{parameters[0], parameters[1]}}, {{parameters[2]}}, {{parameters[3]}}, {{parameters[4]}}},
      torch::optim::SGDOptions(1.));
  scaler.unscale_(optimizer);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].grad().is_same(gradients[i]));
    EXPECT_TRUE(at::equal(gradients[i], tensor({1, -2}).to(gradients[i].scalar_type())));
  }
}

TEST_P(GradScalerOn, UnscalesTransposedStridedAndEmptyGradients) {
  GradScaler scaler({.init_scale = 2.});
  start(scaler);
  at::Tensor storage = at::ones({4, 6}, options());
  const at::Tensor transposed = parameter_with(at::ones({3, 2}, options()).t());
  const at::Tensor strided = parameter_with(storage.slice(1, 0, 6, 2));
  const at::Tensor empty = parameter_with(at::ones({0}, options()));
  auto optimizer = sgd({transposed, strided, empty});
  scaler.unscale_(optimizer);
  expect_close(transposed.grad(), at::full({2, 3}, 0.5, options()));
  expect_close(strided.grad(), at::full({4, 3}, 0.5, options()));
  EXPECT_EQ(storage[0][1].item<float>(), 1.F) << "between the strides";
}

TEST_P(GradScalerOn, UnscalesTheStoredValuesOfSparseGradients) {
  SKIP_WITHOUT_SPARSE(device());
  GradScaler scaler({.init_scale = 2.});
  start(scaler);
  const at::Tensor indices = torch::tensor({{1, 1, 3}}).to(device());
  const at::Tensor gradient = at::sparse_coo_tensor(indices, tensor({2, 4, 6}), {5});
  const at::Tensor parameter = parameter_with(gradient);
  auto optimizer = sgd({parameter});
  scaler.unscale_(optimizer);
  EXPECT_FALSE(parameter.grad().is_coalesced());
  expect_close(parameter.grad().to_dense(), tensor({0, 3, 0, 3, 0}));
}

TEST_P(GradScalerOn, SkipsForANonFiniteValueInASparseGradient) {
  SKIP_WITHOUT_SPARSE(device());
  GradScaler scaler;
  start(scaler);
  const at::Tensor gradient =
      at::sparse_coo_tensor(torch::tensor({{1, 1, 3}}).to(device()), tensor({2, kInf, 6}), {5});
  auto optimizer = sgd({parameter_with(gradient)});
  EXPECT_FALSE(scaler.step(optimizer));
}

TEST_P(GradScalerOn, RefusesHalfGradientsBeforeItTouchesAny) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  const at::Tensor good = parameter_with(tensor({4}));
  const at::Tensor half = parameter_with(tensor({4, 4}).to(at::kHalf));
  torch::optim::SGD optimizer({{{good}}, {{good.detach().clone(), half}}},
                              torch::optim::SGDOptions(1.));
  EXPECT_ERROR(scaler.unscale_(optimizer),
               "GradScaler::unscale_: the gradient of parameter 1 in group 1 [2] is fp16");
  EXPECT_ERROR(scaler.step(optimizer), "GradScaler::step: the gradient of parameter 1 in group 1");
  expect_close(good.grad(), tensor({4}));
  half.mutable_grad() = at::Tensor();
  EXPECT_TRUE(scaler.step(optimizer)) << "the failed calls have left no trace";
  expect_close(good.grad(), tensor({1}));
}

TEST(GradScaler, RefusesGradientsThatKernelsCannotChangeInPlace) {
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  auto expanded = sgd({parameter_with(torch::ones({}).expand({3}))});
  EXPECT_ERROR(scaler.unscale_(expanded), "whose elements share memory");
  at::Tensor matrix = torch::zeros({2, 2}, torch::requires_grad());
  matrix.mutable_grad() = torch::ones({2, 2}).to_sparse_csr();
  auto compressed = sgd({matrix});
  EXPECT_ERROR(scaler.unscale_(compressed), "has the layout SparseCsr");
}

TEST_P(GradScalerOn, LeavesTheOtherGradientsUnscaledWhenItSkips) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  const at::Tensor good = parameter_with(tensor({4, 8}));
  const at::Tensor bad = parameter_with(tensor({kNaN, 8, -kInf}));
  auto optimizer = sgd({good, bad});
  EXPECT_FALSE(scaler.step(optimizer));
  expect_close(good.grad(), tensor({1, 2}));
  expect_close(bad.grad(), tensor({kNaN, 2, -kInf}));
  expect_close(good.detach(), tensor({0, 0}));
}

TEST_P(GradScalerOn, StepsWithWhatTheProgramMadeOfUnscaledGradients) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  const at::Tensor w = parameter_with(tensor({40, 4}));
  auto optimizer = sgd({w});
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.is_unscaled(optimizer));
  w.mutable_grad().clamp_(-2, 2);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_FALSE(scaler.is_unscaled(optimizer));
  expect_close(w.detach(), tensor({-2, -1}));
}

TEST_P(GradScalerOn, DoesNotSeeWhatBecomesNonFiniteAfterUnscalingUnlessAskedTo) {
  for (const bool recheck : {false, true}) {
    GradScaler scaler({.init_scale = 4., .recheck = recheck});
    start(scaler);
    const at::Tensor w = parameter_with(tensor({4}));
    auto optimizer = sgd({w});
    scaler.unscale_(optimizer);
    w.mutable_grad().fill_(kNaN);
    EXPECT_EQ(scaler.step(optimizer).stepped(), !recheck);
    EXPECT_EQ(w.isnan().item<bool>(), !recheck);
  }
}

TEST_P(GradScalerOn, LooksAgainAtTheGradientsOfAStepThatFailedIfAskedTo) {
  struct FailingOnce : torch::optim::SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      if (!std::exchange(failed, true)) throw std::runtime_error("out of luck");
      return SGD::step(closure);
    }
    bool failed = false;
  };
  GradScaler scaler({.init_scale = 4., .recheck = true});
  start(scaler);
  const at::Tensor w = parameter_with(tensor({4}));
  FailingOnce optimizer(std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1.));
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  w.mutable_grad().fill_(kNaN);
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_FALSE(w.isnan().item<bool>());
}

// ---- Scales below 1 -----------------------------------------------------------------------------

TEST_P(GradScalerOn, SeesAGradientThatUnscalingMakesInfinite) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const bool fused : {false, true}) {
      for (const bool unscaled : {false, true}) {
        SCOPED_TRACE(c10::str(dtype, fused ? " fused" : "", unscaled ? " unscaled" : ""));
        const bool overflows = dtype != at::kDouble;
        GradScaler scaler({.init_scale = 0.25});
        start(scaler);
        const at::Tensor w = parameter_with(tensor({1, 1e38F}).to(dtype));
        const at::Tensor empty = parameter_with(tensor({}).to(dtype));
        auto plain_optimizer = sgd({w, empty}, 1e-30);
        torchamp::FusedSGD fused_optimizer({w, empty}, torch::optim::SGDOptions(1e-30));
        torch::optim::Optimizer& optimizer =
            fused ? static_cast<torch::optim::Optimizer&>(fused_optimizer) : plain_optimizer;
        if (unscaled) scaler.unscale_(optimizer);
        EXPECT_EQ(scaler.step(optimizer).stepped(), !overflows);
        EXPECT_EQ(w[1].item<float>() == 0.F, overflows);
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), overflows ? 0.125 : 0.25);
      }
    }
  }
}

TEST_P(GradScalerOn, DividesHalfGradientsOfAFusedStepInFp32) {
  GradScaler scaler({.init_scale = 0.25});
  start(scaler);
  const at::Tensor w = parameter_with(tensor({60000, 8}).to(at::kHalf));
  torchamp::FusedSGD optimizer(std::vector<at::Tensor>{w}, torch::optim::SGDOptions(0x1p-10));
  EXPECT_TRUE(scaler.step(optimizer)) << "240000 is too large for fp16, but not for the step";
  expect_close(w.detach(), tensor({-234.375F, -0.03125F}).to(at::kHalf));
  w.mutable_grad() = tensor({1, kNaN}).to(at::kHalf);
  scaler.update();
  EXPECT_FALSE(scaler.step(optimizer));
}

TEST_P(GradScalerOn, FollowsAScaleThatFallsBelowOneAndNeverStepsWithAnInf) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  const at::Tensor w = parameter_with(tensor({1e38F}));
  torchamp::FusedSGD optimizer(std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1e-30));
  for (int i = 0; i < 6; ++i) {
    w.mutable_grad().fill_(kInf);
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 0.0625);
  w.mutable_grad().fill_(1e38F);
  EXPECT_FALSE(scaler.step(optimizer));
  scaler.update();
  EXPECT_TRUE(at::equal(w.detach(), tensor({0})));
  w.mutable_grad().fill_(1e30F);
  EXPECT_TRUE(scaler.step(optimizer));
}

TEST_P(GradScalerOn, SeesItInAReplayThatTheHostDoesNotSee) {
  GradScaler scaler({.init_scale = 4.});
  const at::Tensor w = parameter_with(tensor({1}));
  torchamp::FusedSGD optimizer(std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1e-30));
  start(scaler);
  move_to_device(scaler);
  optimizer.prepare_captured_step();
  for (const bool unscaled : {false, true}) {
    scaler.scale_tensor().fill_(0.25);  // as a replayed update() might
    w.mutable_grad().fill_(1e38F);
    if (unscaled) scaler.unscale_(optimizer);
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
  }
  EXPECT_TRUE(at::equal(w.detach(), tensor({0})));
}

TEST_P(GradScalerOn, ScalesByOneForGoodWhereTheScaleIsFixedAtOne) {
  GradScaler scaler(GradScalerOptions::skip_non_finite());
  start(scaler);
  const at::Tensor w = parameter_with(tensor({2, 4}).to(at::kHalf));
  torchamp::FusedSGD optimizer(std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1.));
  for (int i = 0; i < 3; ++i) {
    const at::Tensor loss = number(i);
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    scaler.unscale_(optimizer);  // allowed: nothing is divided
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
  }
  scaler.update(2.);
  EXPECT_EQ(scaler.scale(number(3)).item<float>(), 6.F);
}

TEST(GradScaler, UnscalesInAnAutocastRegionAndUnderInferenceModeLikeAnywhereElse) {
  GradScaler scaler({.init_scale = 4.});
  const at::Tensor w = parameter_with(torch::full({2}, 4.));
  auto optimizer = sgd({w});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  {
    const c10::InferenceMode inference;
    scaler.scale(torch::ones({}));
  }
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  expect_close(w.detach(), torch::full({2}, -1.));
  scaler.update(2.);
}

// ---- The scale over time ------------------------------------------------------------------------

TEST_P(GradScalerOn, GrowsAfterTheIntervalAndBacksOffAtOnce) {
  GradScaler scaler(
      {.init_scale = 8., .growth_factor = 4., .backoff_factor = 0.25, .growth_interval = 3});
  const at::Tensor w = tensor({1}).requires_grad_();
  auto optimizer = sgd({w}, 0.);
  struct Row {
    double gradient, scale;
    int64_t growth_tracker;
  };
  const Row table[] = {{1, 8, 1},      {1, 8, 2},    {1, 32, 0},  {1, 32, 1},
                       {kInf, 8, 0},   {kNaN, 2, 0}, {1, 2, 1},   {1, 2, 2},
                       {kInf, 0.5, 0}, {1, 0.5, 1},  {1, 0.5, 2}, {1, 2, 0}};
  for (const Row& row : table) {
    iterate(scaler, optimizer, row.gradient);
    EXPECT_EQ(scaler.get_scale(), row.scale);
    EXPECT_EQ(scaler.state_dict().growth_tracker, row.growth_tracker);
    EXPECT_EQ(scaler.scale_tensor().item<double>(), row.scale);
  }
}

TEST_P(GradScalerOn, RoundsTheProductToFp32AsTheKernelDoes) {
  GradScaler scaler(
      {.init_scale = 3., .growth_factor = 1.1, .backoff_factor = 0.3, .growth_interval = 1});
  const at::Tensor w = tensor({1}).requires_grad_();
  auto optimizer = sgd({w}, 0.);
  at::Tensor scale = number(3);
  at::Tensor tracker = at::zeros({}, options().dtype(at::kInt));
  for (int i = 0; i < 60; ++i) {
    const double gradient = i % 7 == 3 ? kInf : 1;
    at::_amp_update_scale_(scale, tracker, number(i % 7 == 3), 1.1, 0.3, 1);
    iterate(scaler, optimizer, gradient);
    EXPECT_EQ(scaler.get_scale(), scale.item<double>());
  }
}

TEST_P(GradScalerOn, NeverGrowsToInfinity) {
  GradScaler scaler({.init_scale = 0x1p127, .growth_interval = 1});
  const at::Tensor w = tensor({1}).requires_grad_();
  auto optimizer = sgd({w}, 0.);
  iterate(scaler, optimizer, 1e-30);
  EXPECT_EQ(scaler.get_scale(), 0x1p127);
}

TEST_P(GradScalerOn, KeepsTheScaleBetweenFloorAndCeiling) {
  GradScaler scaler({.init_scale = 4.,
                     .growth_interval = 1,
                     .min_scale = 3.,
                     .max_scale = 6.,
                     .at_min_scale = torchamp::AtLimit::keep_going});
  const at::Tensor w = tensor({1}).requires_grad_();
  auto optimizer = sgd({w}, 0.);
  iterate(scaler, optimizer, 1);
  EXPECT_EQ(scaler.get_scale(), 6.);
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), 3.);
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), 3.);
}

TEST_P(GradScalerOn, HasAFiniteInverseHoweverOftenItBacksOff) {
  GradScaler scaler({.at_min_scale = torchamp::AtLimit::keep_going});
  const at::Tensor w = tensor({1}).requires_grad_();
  auto optimizer = sgd({w}, 1.);
  for (int i = 0; i < 200; ++i) iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), std::numeric_limits<float>::min());
  iterate(scaler, optimizer, 1);
  EXPECT_TRUE(w.isfinite().item<bool>()) << "torch.amp divides by 0 here";
}

TEST(GradScaler, KeepsTheScaleIfItIsNotDynamic) {
  GradScaler scaler(GradScalerOptions::fixed(16.));
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  auto optimizer = sgd({w}, 0.);
  for (const double gradient : {1., HUGE_VAL, 1.}) {
    optimizer.zero_grad();
    scaler.scale((w * gradient).sum()).backward();
    EXPECT_EQ(scaler.step(optimizer).stepped(), std::isfinite(gradient));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 16.);
  }
  scaler.update(2.);
  EXPECT_EQ(scaler.get_scale(), 2.);
}

TEST(GradScaler, SkipsNonFiniteStepsWithoutScaling) {
  GradScaler scaler(GradScalerOptions::skip_non_finite());
  const at::Tensor w = torch::ones({1}, torch::requires_grad());
  auto optimizer = sgd({w});
  const at::Tensor loss = (w * w).sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  expect_close(w.detach(), torch::full({1}, -1.));
  w.mutable_grad().fill_(kNaN);
  EXPECT_FALSE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.skips_in_a_row(), 1);
  EXPECT_EQ(scaler.get_scale(), 1.);
}

// ---- Several optimizers
// ---------------------------------------------------------------------------

TEST_P(GradScalerOn, SkipsOnlyTheBadOptimizerAndBacksOffForBoth) {
  GradScaler scaler({.init_scale = 4., .growth_interval = 1});
  start(scaler);
  const at::Tensor good = parameter_with(tensor({4}));
  const at::Tensor bad = parameter_with(tensor({kInf}));
  auto one = sgd({good});
  auto two = sgd({bad});
  EXPECT_TRUE(scaler.step(one));
  EXPECT_FALSE(scaler.step(two));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2.);
  expect_close(good.detach(), tensor({-1}));
  expect_close(bad.detach(), tensor({0}));
}

TEST_P(GradScalerOn, CountsAnOptimizerThatWasUnscaledAndNotStepped) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  auto bad = sgd({parameter_with(tensor({kInf}))});
  scaler.unscale_(bad);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2.);
}

TEST(GradScaler, UnscalesAParameterOfTwoOptimizersTwice) {
  GradScaler scaler({.init_scale = 4.});
  scaler.scale(torch::ones({}));
  const at::Tensor shared = parameter_with(torch::full({1}, 16.));
  auto one = sgd({shared}, 0.);
  auto two = sgd({shared}, 0.);
  scaler.step(one);
  scaler.step(two);
  expect_close(shared.grad(), torch::ones({1}));
}

TEST(GradScaler, ServesParametersOnSeveralDevices) {
  SKIP_WITHOUT(at::kCUDA);
  GradScaler scaler({.init_scale = 4.});
  for (const bool bad : {false, true}) {
    const at::Tensor here = parameter_with(torch::full({1}, 4.));
    const at::Tensor there =
        parameter_with(torch::full({1}, bad ? kInf : 4., torch::device(torch::kCUDA)));
    auto optimizer = sgd({here, there});
    scaler.scale(torch::ones({}));
    EXPECT_EQ(scaler.step(optimizer).stepped(), !bad);
    expect_close(here.detach(), torch::full({1}, bad ? 0. : -1.));
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 2.);
  const auto scaled = scaler.scale({torch::ones({}), torch::ones({}, torch::kCUDA)});
  EXPECT_TRUE(scaled[0].is_cpu());
  EXPECT_TRUE(scaled[1].is_cuda());
}

TEST(GradScaler, FlagsWithExactlyOneHoweverOftenAnotherDeviceFindsIt) {
  SKIP_WITHOUT(at::kCUDA);
  GradScaler scaler({.init_scale = 0.5, .recheck = true});
  scaler.scale(torch::ones({}));
  auto optimizer = sgd({parameter_with(torch::full({1}, kInf, torch::device(torch::kCUDA)))});
  scaler.unscale_(optimizer);
  EXPECT_EQ(scaler.found_inf(optimizer).item<float>(), 1.F);
  EXPECT_FALSE(scaler.step(optimizer));
}

TEST(GradScaler, WaitsForTheFlagOfABusyDeviceWhereTheScaleLiesOnTheHost) {
  SKIP_WITHOUT(at::kCUDA);
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  at::Tensor work = torch::ones({2048, 2048}, torch::kCUDA);
  const at::Tensor w = parameter_with(torch::full({1}, kInf, torch::device(torch::kCUDA)));
  auto optimizer = sgd({w});
  for (int i = 0; i < 100; ++i) work = work.mm(work) / 2048;
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_EQ(scaler.scale({torch::ones({}), torch::ones({}, torch::kCUDA)})[0].item<float>(),
            65536.F);
}

// ---- update(new_scale), getters, setters
// ---------------------------------------------------------

TEST_P(GradScalerOn, TakesANewScaleAndKeepsTheTracker) {
  GradScaler scaler({.init_scale = 4., .growth_interval = 3});
  const at::Tensor w = tensor({1}).requires_grad_();
  auto optimizer = sgd({w}, 0.);
  iterate(scaler, optimizer, 1);
  auto bad = sgd({parameter_with(tensor({kInf}))});
  scaler.step(bad);
  scaler.update(32.);
  EXPECT_EQ(scaler.get_scale(), 32.) << "what was found is forgotten";
  EXPECT_EQ(scaler.state_dict().growth_tracker, 1);
  scaler.update(at::full({1}, 64., options().dtype(at::kDouble)));
  EXPECT_EQ(scaler.get_scale(), 64.);
  EXPECT_EQ(scaler.scale_tensor().item<float>(), 64.F);
  iterate(scaler, optimizer, 1);
  iterate(scaler, optimizer, 1);
  EXPECT_EQ(scaler.get_scale(), 128.);
}

TEST(GradScaler, RefusesANewScaleThatIsNone) {
  GradScaler scaler({.init_scale = 4., .min_scale = 1., .max_scale = 1024.});
  scaler.scale(torch::ones({}));
  for (const double bad : {0., -1., 0.5, 2048., HUGE_VAL, std::nan("")}) {
    EXPECT_ERROR(scaler.update(bad), "GradScaler::update: the scale is");
    EXPECT_ERROR(scaler.update(torch::full({}, bad)), "GradScaler::update: the scale is");
  }
  EXPECT_ERROR(scaler.update(torch::ones({2})), "one real number without requires_grad");
  EXPECT_ERROR(scaler.update(torch::ones({}, torch::requires_grad())), "without requires_grad");
  EXPECT_ERROR(scaler.update(at::Tensor()), "one real number");
  EXPECT_ERROR(scaler.update(torch::ones({}, torch::kMeta)),
               "the new scale is on meta, the scale on cpu. Move it there.");
  EXPECT_EQ(scaler.get_scale(), 4.);
}

TEST(GradScaler, ChecksWhatIsSet) {
  GradScaler scaler;
  scaler.set_growth_factor(3.);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(7);
  EXPECT_EQ(scaler.get_growth_factor(), 3.);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_EQ(scaler.get_growth_interval(), 7);
  EXPECT_ERROR(scaler.set_growth_factor(1.), "set_growth_factor: the growth factor is 1");
  EXPECT_ERROR(scaler.set_backoff_factor(1.), "set_backoff_factor: the backoff factor is 1");
  EXPECT_ERROR(scaler.set_growth_interval(0), "set_growth_interval: the growth interval is 0");
  EXPECT_EQ(scaler.get_growth_interval(), 7);
}

TEST_P(GradScalerOn, GrowsAfterTheNextGoodIterationOnceTheIntervalIsMadeShorter) {
  GradScaler scaler({.init_scale = 4.});
  const at::Tensor w = tensor({1}).requires_grad_();
  auto optimizer = sgd({w}, 0.);
  for (int i = 0; i < 5; ++i) iterate(scaler, optimizer, 1);
  scaler.set_growth_interval(3);
  iterate(scaler, optimizer, 1);
  EXPECT_EQ(scaler.get_scale(), 8.);
}

TEST(GradScaler, KnowsTheInitialScaleBeforeItsFirstUse) {
  EXPECT_EQ(GradScaler().get_scale(), 65536.);
  EXPECT_EQ(GradScaler({.enabled = false}).get_scale(), 1.);
}

// ---- Disabled -----------------------------------------------------------------------------------

TEST(GradScaler, DoesNothingWhenDisabled) {
  GradScaler scaler({.growth_factor = 0., .enabled = false});
  EXPECT_FALSE(scaler.is_enabled());
  const at::Tensor loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  EXPECT_TRUE(scaler.scale(std::vector<at::Tensor>{loss})[0].is_same(loss));
  const at::Tensor w = parameter_with(torch::full({1}, kInf));
  auto optimizer = sgd({w});
  scaler.unscale_(optimizer);
  scaler.update();
  scaler.update(4.);
  const torchamp::StepResult result = scaler.step(optimizer);
  EXPECT_TRUE(result.stepped());
  EXPECT_EQ(result.scale(), 1.);
  EXPECT_EQ(result.skips_in_a_row(), 0);
  EXPECT_TRUE(w.isinf().item<bool>()) << "the optimizer steps whatever the gradients hold";
  EXPECT_TRUE(scaler.state_dict().empty());
  scaler.load_state_dict({});
  EXPECT_FALSE(scaler.scale_tensor().defined());
}

// ---- Without gradients
// ----------------------------------------------------------------------------

TEST(GradScaler, NeitherThrowsNorSticksInAStepWithoutGradients) {
  GradScaler scaler({.init_scale = 4., .growth_interval = 1});
  scaler.scale(torch::ones({}));
  const at::Tensor w = torch::ones({2}, torch::requires_grad());
  auto optimizer = sgd({w});
  const CollectedWarnings warnings;
  for (int i = 0; i < 2; ++i) {
    const torchamp::StepResult result = scaler.step(optimizer);
    EXPECT_FALSE(result.stepped());
    EXPECT_FALSE(result.had_gradients());
    EXPECT_EQ(result.skips_in_a_row(), 0);
    ASSERT_EQ(result.missing_gradients().size(), 1U);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4.) << "neither good nor bad";
  }
  EXPECT_THAT(warnings.text(),
              ::testing::HasSubstr("no parameter of this optimizer has a gradient"));
  EXPECT_THAT(warnings.text(),
              ::testing::HasSubstr("group 0, parameter 0 (Float [2] on cpu): no back"));
  EXPECT_EQ(warnings.text().find("GradScaler::step"), warnings.text().rfind("GradScaler::step"))
      << "warned once";
  scaler.scale(w.sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8.);
}

TEST(GradScaler, ScalesInARegionAsOutsideOfIt) {
  using torchamp::Policy;
  const torchamp::AutocastGuard half(
      at::kCPU, {.dtype = at::kHalf, .policy = Policy::standard().lower_precision({"mul"})});
  GradScaler scaler;
  const at::Tensor loss = scaler.scale(torch::full({}, 3.));
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_EQ(loss.item<float>(), 3 * 65536.F);
  const torchamp::AutocastGuard wide(at::kCPU, {.policy = Policy::standard().fp32({"mul"})});
  EXPECT_EQ(scaler.scale(torch::ones({2}, at::kHalf)).scalar_type(), at::kHalf);
}

TEST(GradScaler, HasNoScaleAfterAFirstTensorThatCannotBeScaled) {
  GradScaler scaler;
  const at::Tensor quantized = at::quantize_per_tensor(torch::ones({2}), 0.1, 0, at::kQInt8);
  EXPECT_ANY_THROW(scaler.scale(quantized));
  EXPECT_FALSE(scaler.scale_tensor().defined());
  EXPECT_ANY_THROW(scaler.scale(at::TensorList{torch::ones({}), quantized}));
  EXPECT_FALSE(scaler.scale_tensor().defined());
}

TEST(GradScaler, UnscalesTheGradientOfAModuleThatIsRegisteredTwiceOnce) {
  torch::nn::Linear shared(1, 1);
  torch::nn::Module model;
  model.register_module("first", shared);
  model.register_module("second", shared);
  torch::optim::SGD optimizer(model.parameters(), 0.);
  ASSERT_EQ(optimizer.param_groups()[0].params().size(), 4U);
  GradScaler scaler({.init_scale = 8.});
  scaler.scale((shared->weight * 3).sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_EQ(shared->weight.grad().item<float>(), 3.F);
}

INSTANTIATE_TEST_SUITE_P(Devices, GradScalerOn,
                         ::testing::Values(Where{at::kCPU, false}, Where{at::kCPU, true},
                                           Where{at::kCUDA, false}, Where{at::kCUDA, true},
                                           Where{at::kPrivateUse1, false},
                                           Where{at::kPrivateUse1, true}),
                         [](const auto& where) {
                           return name_of_device(where.param.device) +
                                  (where.param.rule_on_device ? "_rule_on_device" : "");
                         });
