// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/grad_scaler.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/autocast.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/grad_scaler_on.h"
#include "support/non_finite.h"
#include "support/optimizers.h"
#include "support/tolerances.h"
#include "support/warnings.h"

using grad_scaler_on::GradScalerOn;
using grad_scaler_on::Where;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;

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

// ---- Several optimizers -------------------------------------------------------------------------

TEST_P(GradScalerOn, SkipsOnlyTheBadOptimizerAndBacksOffForBoth) {
  for (const bool bad_first : {false, true}) {
    GradScaler scaler({.init_scale = 4., .growth_interval = 1});
    start(scaler);
    const at::Tensor good = parameter_with(tensor({4}));
    const at::Tensor bad = parameter_with(tensor({kInf}));
    auto one = sgd({bad_first ? bad : good});
    auto two = sgd({bad_first ? good : bad});
    EXPECT_EQ(scaler.step(one).stepped(), !bad_first);
    EXPECT_EQ(scaler.step(two).stepped(), bad_first);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2.);
    expect_close(good.detach(), tensor({-1}));
    expect_close(bad.detach(), tensor({0}));
  }
}

TEST_P(GradScalerOn, CountsAnOptimizerThatWasUnscaledAndNotStepped) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  auto bad = sgd({parameter_with(tensor({kInf}))});
  scaler.unscale_(bad);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2.);
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

TEST_P(GradScalerOn, FlagsWithExactlyOneHoweverOftenAnotherDeviceFindsIt) {
  GradScaler scaler({.init_scale = 0.5, .recheck = true});
  scaler.scale(torch::ones({}));
  auto optimizer = sgd({parameter_with(torch::full({1}, kInf)), parameter_with(tensor({kInf}))});
  scaler.unscale_(optimizer);
  EXPECT_EQ(scaler.found_inf(optimizer).item<float>(), 1.F);
  EXPECT_FALSE(scaler.step(optimizer));
}

TEST(GradScaler, WaitsForTheFlagOfABusyDeviceIfTheScaleLiesOnTheHost) {
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

// ---- update(new_scale), getters, setters --------------------------------------------------------

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

TEST(GradScaler, ChecksOnlyWhatIsSetOfADisabledOne) {
  GradScaler scaler({.growth_factor = 0., .growth_interval = 0, .enabled = false});
  EXPECT_NO_THROW(scaler.set_backoff_factor(0.25));
  EXPECT_NO_THROW(scaler.set_growth_interval(7));
  EXPECT_NO_THROW(scaler.set_growth_factor(3.));
  EXPECT_ERROR(scaler.set_growth_factor(1.), "set_growth_factor: the growth factor is 1");
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

// ---- Without gradients --------------------------------------------------------------------------

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
