// SPDX-License-Identifier: BSD-3-Clause
// What becomes of gradients when they are unscaled.
#include <torchamp/grad_scaler.h>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

#include "simulated_device/device.h"
#include "support/expect_error.h"
#include "support/grad_scaler_on.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"
#include "support/skips.h"
#include "support/tolerances.h"

using grad_scaler_on::GradScalerOn;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;

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

TEST_P(GradScalerOn, DividesAGradientOfTwoParametersOnce) {
  for (const double scale : {4., 1.}) {
    for (const bool fused : {false, true}) {
      for (const bool unscales : {false, true}) {
        GradScaler scaler({.init_scale = scale});
        start(scaler);
        const at::Tensor gradient = tensor({4, 8});
        const std::vector<at::Tensor> two{parameter_with(gradient), parameter_with(gradient)};
        const auto optimizer = plain_or_fused_sgd(two, fused);
        if (unscales) scaler.unscale_(*optimizer);
        EXPECT_TRUE(scaler.step(*optimizer));
        for (const at::Tensor& parameter : two) expect_close(parameter, -tensor({4, 8}) / scale);
      }
    }
  }
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

/// Whichever of several gradients, dtypes and batches of them holds the inf.
TEST(GradScalerSimulated, SkipsForAnyInfIfTheDeviceHasNoKernelThatUnscales) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const simulated::WithoutUnscaleKernel lacks;
  const at::TensorOptions there = simulated::on(simulated::sim0);
  constexpr at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kDouble};
  for (const double init_scale : {4., 0.5}) {  // checked once, and twice
    for (const bool fused : {false, true}) {
      for (int bad = -1; bad < 6; ++bad) {
        SCOPED_TRACE(c10::str("scale ", init_scale, fused ? ", fused, " : ", ", bad));
        GradScaler scaler({.init_scale = init_scale});
        scaler.scale(at::ones({}, there));
        std::vector<at::Tensor> parameters;
        for (int i = 0; i < 6; ++i) {
          const float value = i == bad ? kInf : 4.F;
          parameters.push_back(parameter_with(at::full({2}, value, there).to(dtypes[i % 3])));
        }
        const auto optimizer = plain_or_fused_sgd(parameters, fused);
        EXPECT_EQ(scaler.step(*optimizer).stepped(), bad < 0);
        for (const at::Tensor& parameter : parameters) {
          EXPECT_EQ(parameter[0].item<double>(), bad < 0 ? -4. / init_scale : 0.);
        }
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), bad < 0 ? init_scale : init_scale / 2);
      }
    }
  }
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
        const auto optimizer = plain_or_fused_sgd({w, empty}, fused, 1e-30);
        if (unscaled) scaler.unscale_(*optimizer);
        EXPECT_EQ(scaler.step(*optimizer).stepped(), !overflows);
        EXPECT_EQ(w[1].item<float>() == 0.F, overflows);
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), overflows ? 0.125 : 0.25);
      }
    }
  }
}

/// As Python does: CUDA's kernel checks fp64 gradients as fp32, a CPU's as fp64. What dividing
/// makes of them, and a second look, count as they are in fp64 everywhere.
TEST_P(GradScalerOn, SkipsForFp64GradientsBeyondFp32IfTheDevicesKernelDoes) {
  const bool narrows = GetParam().device != at::kCPU;
  for (const double init_scale : {4., 0.25}) {
    for (const double value : {3e38, 4e38, 1e300}) {
      for (int form = 0; form < 4; ++form) {
        SCOPED_TRACE(c10::str("scale ", init_scale, ", gradient ", value, ", form ", form));
        GradScaler scaler({.init_scale = init_scale, .recheck = form == 3});
        start(scaler);
        const at::Tensor w = parameter_with(at::full({2}, value, options().dtype(at::kDouble)));
        const auto optimizer = plain_or_fused_sgd({w}, form == 1, 1.);
        if (form == 2) scaler.unscale_(*optimizer);
        const bool steps = !narrows || value < 3.5e38;
        EXPECT_EQ(scaler.step(*optimizer).stepped(), steps);
        EXPECT_EQ(w[0].item<double>(), steps ? -value / init_scale : 0.);
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

TEST_P(GradScalerOn, DetectsItInAReplay) {
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

TEST_P(GradScalerOn, ScalesByOneForeverIfTheScaleIsFixedAtOne) {
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
