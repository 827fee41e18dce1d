// SPDX-License-Identifier: BSD-3-Clause
// Clipping at scales, and by divisors, to which fp32 hardly reaches.
#include "torchamp/clip_grad.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "simulated_device/facts.h"
#include "support/call_counter.h"
#include "support/clipping.h"
#include "support/on_device.h"
#include "support/tolerances.h"

namespace {

using clipping::backward;
using clipping::ClipGrad;
using clipping::inf;

/// The norm and the step of gradients that were scaled and clipped.
struct ClippedStep {
  bool stepped = false;
  Tensor norm;
  Params params;
};

template <class Optimizer>
ClippedStep clipped_step(const std::vector<Tensor>& gradients, double scale, double max_norm,
                         double norm_type, bool on_device = false) {
  Params params;
  for (const Tensor& g : gradients) params.push_back(torch::zeros_like(g).requires_grad_());
  Optimizer optimizer(params, SGDOptions(1.));
  torchamp::GradScaler scaler({.init_scale = scale});
  backward(scaler, optimizer, params, gradients);
  if (on_device) move_to_device(scaler);
  ClippedStep result;
  result.norm = torchamp::clip_grad_norm_(scaler, optimizer, max_norm, norm_type);
  result.stepped = scaler.step(optimizer).stepped();
  scaler.update();
  EXPECT_EQ(scaler.get_scale() < scale, !result.stepped);
  result.params = params;
  return result;
}

TEST_P(ClipGrad, ClipsAsThePlainOptimizerDoesWhateverTheScale) {
  const std::vector<Tensor> gradients{torch::randn({3000}, options()).clamp(-3., 3.),
                                      torch::randn({5}, options()).clamp(-3., 3.)};
  for (const double scale :
       {0x1p-120, 0x1p-90, 0x1p-60, 1., 0x1p20, 0x1p31, 0x1p40, 0x1p58, 0x1p64, 0x1p100, 0x1p125}) {
    for (const double norm_type : {2., 1., inf, -inf, 3., 0.5, 10., 0.}) {
      for (const double max_norm : {1e-3, 1., 1e6}) {
        SCOPED_TRACE(c10::str(scale, ' ', norm_type, ' ', max_norm));
        const ClippedStep plain =
            clipped_step<torch::optim::SGD>(gradients, scale, max_norm, norm_type);
        const ClippedStep fused =
            clipped_step<torchamp::FusedSGD>(gradients, scale, max_norm, norm_type, dice(2) == 0);
        ASSERT_TRUE(std::isfinite(plain.norm.item<double>()));
        expect_close(fused.norm, plain.norm);
        EXPECT_TRUE(plain.stepped);
        // What a fused step divides by is an overflow where fp32 does not hold it.
        const double divisor = scale * std::max(plain.norm.item<double>() / max_norm, 1.);
        ASSERT_EQ(fused.stepped, divisor < std::numeric_limits<float>::max());
        if (!fused.stepped) continue;
        EXPECT_EQ(fused.norm.scalar_type(), at::kFloat);
        const double larger = 1. / std::max(plain.params[0].abs().max().item<double>(), 1e-30);
        for (std::size_t i = 0; i < gradients.size(); ++i) {  // small steps are compared as well
          expect_close(fused.params[i] * larger, plain.params[i] * larger);
        }
      }
    }
  }
}

TEST(ClipGradOnTheHost, OfScaledGradientsDoesNotHideThatASmallScaleMakesInfsOfThem) {
  const Tensor weight = torch::zeros({1}).requires_grad_();
  torchamp::FusedSGD optimizer({weight}, SGDOptions(1.));
  torchamp::GradScaler scaler(torchamp::GradScalerOptions::fixed(0.25));
  scaler.scale(weight.sum()).backward();
  weight.mutable_grad().fill_(3e38);
  torchamp::clip_grad_norm_(optimizer, inf);  // measures
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_EQ(weight.item<float>(), 0.F);
}

TEST_P(ClipGrad, NeverStepsWithADivisorThatFp32CannotHold) {
  for (const bool fp64 : {false, true}) {
    const simulated::Facts facts(
        {.type = at::kPrivateUse1, .fp64 = fp64 ? simulated::Fp64::yes : simulated::Fp64::unknown});
    const Tensor direction = torch::tensor({3., -4., 0.}, options());
    const Tensor parameter = torch::zeros_like(direction).requires_grad_();
    torchamp::FusedSGD optimizer({parameter}, SGDOptions(1000.));
    torchamp::GradScaler scaler({.init_scale = 1024.});
    int skipped = 0;
    for (bool stepped = false; !stepped; skipped += stepped ? 0 : 1) {
      ASSERT_LT(skipped, 12);
      optimizer.zero_grad();
      scaler.scale((parameter * direction * 1e34).sum()).backward();
      (void)torchamp::clip_grad_norm_(scaler, optimizer, 1e-3, inf);
      stepped = scaler.step(optimizer).stepped();
      scaler.update();
      if (!stepped) {
        ASSERT_EQ(parameter.detach().abs().sum().item<float>(), 0.F);
      }
    }
    EXPECT_GT(skipped, 0);
    expect_close(parameter.detach(), torch::tensor({-0.75, 1., 0.}, options()));
  }
}

TEST_P(ClipGrad, SkipsAFusedStepWithInfsAndNaNsWhateverTheNorm) {
  for (const bool fp64 : {false, true}) {
    const simulated::Facts facts(
        {.type = at::kPrivateUse1, .fp64 = fp64 ? simulated::Fp64::yes : simulated::Fp64::unknown});
    const Params params{torch::ones({3}, options()).requires_grad_(),
                        torch::ones({2}, options(at::kHalf)).requires_grad_()};
    torchamp::FusedSGD optimizer(params, SGDOptions(1.));
    torchamp::GradScaler scaler({.init_scale = 1024.});

    for (const double norm_type : {2., 1., inf, 3., 0., -1.}) {
      for (const double max_norm : {0.5, 1e-8, 0.}) {
        for (const double bad : {inf, -inf, std::nan(""), 1.}) {
          SCOPED_TRACE(c10::str(norm_type, ' ', max_norm, ' ', bad));
          optimizer.zero_grad();
          scaler.scale(params[0].sum() + params[1].sum()).backward();
          params[bad == inf ? 1 : 0].mutable_grad().narrow(0, 1, 1).mul_(bad);
          (void)torchamp::clip_grad_norm_(scaler, optimizer, max_norm, norm_type);
          EXPECT_EQ(scaler.step(optimizer).stepped(), bad == 1.);
          scaler.update(1024.);
          for (const Tensor& p : params) EXPECT_TRUE(p.isfinite().all().item<bool>());
        }
      }
    }
  }
}

TEST_P(ClipGrad, ToANormOfZeroIsAStepWithZeros) {
  const Tensor parameter = torch::ones({3}, options()).requires_grad_();
  torchamp::FusedSGD optimizer({parameter}, SGDOptions(1.));
  torchamp::GradScaler scaler({.init_scale = 4.});
  scaler.scale((parameter * 2.).sum()).backward();
  (void)torchamp::clip_grad_norm_(scaler, optimizer, 0.);
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  expect_close(parameter.detach(), torch::ones({3}, options()));
}

TEST_P(ClipGrad, ToAnyNormLeavesGradientsUnchanged) {
  for (const double max_norm : {0x1p127, 1e39, 1e300, inf}) {
    SCOPED_TRACE(max_norm);
    const Tensor parameter = torch::ones({3}, options()).requires_grad_();
    torchamp::FusedSGD optimizer({parameter}, SGDOptions(0.125));
    torchamp::GradScaler scaler({.init_scale = 4.});
    scaler.scale((parameter * 2.).sum()).backward();
    expect_close(torchamp::clip_grad_norm_(scaler, optimizer, max_norm),
                 torch::full({}, std::sqrt(12.), options()));
    EXPECT_TRUE(scaler.step(optimizer).stepped());
    expect_close(parameter.detach(), torch::full({3}, 0.75, options()));
    parameter.mutable_grad() = torch::full({3}, 8., options());
    (void)torchamp::clip_grad_norm_(parameter, max_norm);
    expect_close(parameter.grad(), torch::full({3}, 8., options()));
    (void)torchamp::clip_grad_norm_(optimizer, max_norm);
    optimizer.step();
    expect_close(parameter.detach(), torch::full({3}, -0.25, options()));
  }
}

TEST_P(ClipGrad, ToAnInfiniteNormLeavesGradientsWhoseNormFp32CannotHold) {
  const auto weight = [] { return torch::zeros({3}, options()).requires_grad_(); };
  const double large = 0x1p70;
  const Tensor expected = torch::full({3}, -1., options());
  const Params params{weight()};
  params[0].mutable_grad() = torch::full({3}, large, options());
  EXPECT_TRUE(std::isinf(torchamp::clip_grad_norm_(params, inf).item<float>()));
  expect_close(params[0].grad(), torch::full({3}, large, options()));
  torchamp::FusedSGD fused(params, SGDOptions(1. / large));
  (void)torchamp::clip_grad_norm_(fused, inf);
  fused.step();
  expect_close(params[0].detach(), expected);
  for (const double scale : {1., 4.}) {
    const Params plain{weight()};
    torch::optim::SGD optimizer(plain, SGDOptions(1. / large));
    torchamp::GradScaler scaler({.init_scale = scale});
    backward(scaler, optimizer, plain, {torch::full({3}, large, options())});
    (void)torchamp::clip_grad_norm_(scaler, optimizer, inf);
    EXPECT_TRUE(scaler.step(optimizer).stepped());
    expect_close(plain[0].detach(), expected);
  }
}

TEST(ClipGradOnTheHost, ToAnInfiniteNormLeavesAFusedStepWhoseNormFp32CannotHold) {
  const Params params{torch::zeros({8}).requires_grad_()};
  torchamp::FusedSGD optimizer(params, SGDOptions(0x1p-127));
  torchamp::GradScaler scaler({.init_scale = 1.});
  backward(scaler, optimizer, params, {torch::full({8}, 0x1p127)});
  EXPECT_TRUE(std::isinf(torchamp::clip_grad_norm_(scaler, optimizer, inf).item<float>()));
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  expect_close(params[0].detach(), torch::full({8}, -1.));
  scaler.update();
  backward(scaler, optimizer, params, {torch::full({8}, inf)});
  (void)torchamp::clip_grad_norm_(scaler, optimizer, inf);
  EXPECT_FALSE(scaler.step(optimizer).stepped());
}

TEST_P(ClipGrad, ClipsOnceMoreWhateverTheScale) {
  for (const double scale : {0x1p-90, 1., 0x1p100}) {
    const Params params{torch::zeros({2000}, options()).requires_grad_()};
    torchamp::FusedSGD optimizer(params, SGDOptions(1.));
    torchamp::GradScaler scaler({.init_scale = scale});
    backward(scaler, optimizer, params, {torch::full({2000}, 3., options())});
    const auto norm = [&](double limit) {
      return torchamp::clip_grad_norm_(scaler, optimizer, limit).item<double>();
    };
    EXPECT_NEAR(norm(2.), 3. * std::sqrt(2000.), 1e-3);
    EXPECT_NEAR(norm(1.), 2., 1e-5);
    scaler.unscale_(optimizer);  // between the clips, too
    EXPECT_NEAR(norm(0.5), 1., 1e-5);
    scaler.step(optimizer);
    expect_close(params[0], torch::full({2000}, -0.5 / std::sqrt(2000.), options()));
  }
}

TEST_P(ClipGrad, LeavesFp16GradientsToAFusedStepAtALargeScale) {
  const Params params{torch::zeros({4}, options(at::kHalf)).requires_grad_()};
  torchamp::FusedSGD optimizer(params, SGDOptions(0x1p40));
  params[0].mutable_grad() = torch::ones({4}, options(at::kHalf));
  torchamp::GradScaler scaler({.init_scale = 0x1p40});
  scaler.scale(torch::ones({}, options()));
  expect_close(torchamp::clip_grad_norm_(scaler, optimizer, 0.),
               torch::full({}, 0x1p-39, options()));
  optimizer.take_next_step_divisor();
  optimizer.divide_next_step(number(2., params[0].device()));
  scaler.step(optimizer);
  expect_close(params[0], torch::full({4}, -0.5, options(at::kHalf)));
}

TEST_P(ClipGrad, ClipsFp64GradientsOnTopOfADivisor) {
  const Params params{torch::zeros({4}, options(at::kDouble)).requires_grad_()};
  torchamp::FusedSGD optimizer(params, SGDOptions(1.));
  params[0].mutable_grad() = torch::full({4}, 2., options(at::kDouble));
  optimizer.divide_next_step(number(2., params[0].device()));
  EXPECT_EQ(torchamp::clip_grad_norm_(optimizer, 1.).item<double>(), 2.);
  optimizer.step();
  expect_close(params[0], torch::full({4}, -1. / (2. + 1e-6), options(at::kDouble)));
}

TEST(ClipGradPasses, AreOneUnlessTheNormIsAtAnEndOfFp32) {
  struct Passes {
    int norms, copies;
  };
  const auto passes = [](double scale, double norm_type) -> Passes {
    const Params params{torch::zeros({3000}).requires_grad_()};
    torchamp::FusedSGD optimizer(params, SGDOptions(1.));
    torchamp::GradScaler scaler({.init_scale = scale});
    backward(scaler, optimizer, params, {torch::full({3000}, 0.3)});
    const CallCounter counter;
    torchamp::clip_grad_norm_(scaler, optimizer, 1., norm_type);
    EXPECT_EQ(counter.reads(), 0);
    return {counter.called("aten::_foreach_norm"), counter.called("aten::_foreach_div")};
  };
  for (const double scale : {0x1p-30, 1., 0x1p16, 0x1p40}) {
    for (const double norm_type : {2., 1.}) {
      EXPECT_EQ(passes(scale, norm_type).norms, 1) << scale;
      EXPECT_EQ(passes(scale, norm_type).copies, 0) << scale;
    }
  }
  EXPECT_EQ(passes(0x1p64, 2.).norms, 2);
  EXPECT_EQ(passes(0x1p-60, 2.).norms, 2);
  EXPECT_EQ(passes(0x1p125, 1.).norms, 2);
  for (const double scale : {0x1p-90, 0x1p16, 0x1p120}) {
    EXPECT_EQ(passes(scale, inf).norms, 1);
    EXPECT_EQ(passes(scale, inf).copies, 0);
    EXPECT_EQ(passes(scale, 3.).norms, 1);
    EXPECT_EQ(passes(scale, 3.).copies, 1);
  }
}

}  // namespace
