// SPDX-License-Identifier: BSD-3-Clause
// A clip that is left to the next step: what was clipped is what is stepped.
#include "torchamp/clip_grad.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "simulated_device/device.h"
#include "simulated_device/memory.h"
#include "support/clipping.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/tolerances.h"

namespace {

using clipping::with_gradient;
using clipping::with_gradients;

/// Two parameters with gradients, clipped to a half, and what to do then.
struct Clipped {
  Params params = with_gradients({torch::full({4}, 3.), torch::full({7}, 2.)});
  Tensor without = torch::zeros({2}).requires_grad_();
  torchamp::FusedSGD optimizer{Params{params[0], params[1], without}, SGDOptions(1.)};

  Clipped() { torchamp::clip_grad_norm_(optimizer, 4.); }
  void step_is_refused() {
    EXPECT_ERROR(optimizer.step(),
                 "the gradients are not those that clip_grad_norm_ has clipped and left to the "
                 "next step");
    for (const Tensor& p : params) expect_close(p, torch::zeros_like(p));
    EXPECT_ERROR(optimizer.step(), "Clip after the last such change");  // until it is corrected
    optimizer.take_next_step_divisor();
    EXPECT_FALSE(optimizer.next_step_divisor().defined());
    optimizer.step();
    for (const Tensor& p : params) {
      if (p.grad().defined()) expect_close(p, -p.grad());
    }
  }
};

TEST(DeferredClips, IsRefusedForGradientsThatWereChangedAfterIt) {
  const std::vector<std::function<void(Clipped&)>> changes{
      [](Clipped& c) { c.params[0].mutable_grad() = c.params[0].grad().clone(); },
      [](Clipped& c) { c.params[1].mutable_grad() = c.params[1].grad().clone(); },
      [](Clipped& c) {
        for (Tensor& p : c.params) p.mutable_grad() = p.grad().clone();
      },
      [](Clipped& c) { c.params[0].mutable_grad().reset(); },
      [](Clipped& c) { c.params[1].mutable_grad().reset(); },
      [](Clipped& c) { c.params[0].grad().mul_(2.); },
      [](Clipped& c) { c.params[1].grad().add_(1.); },
      [](Clipped& c) { c.without.mutable_grad() = torch::ones({2}); },
      [](Clipped& c) { c.params[1].sum().backward(); },
      [](Clipped& c) { static_cast<Optimizer&>(c.optimizer).zero_grad(/*set_to_none=*/false); },
      [](Clipped& c) {
        c.optimizer.add_param_group(OptimizerParamGroup({with_gradient(torch::full({3}, 2.))}));
      }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(i);
    Clipped clipped;
    changes[i](clipped);
    clipped.step_is_refused();
  }
}

TEST(DeferredClips, DividesByTheNormWithPyTorchsEpsilonOverTheLimit) {
  for (const double max_norm : {1e-6, 3e-6, 0.1, 7.}) {
    SCOPED_TRACE(max_norm);
    const Tensor parameter = with_gradient(torch::full({1}, 2. * max_norm));
    torchamp::FusedSGD optimizer(Params{parameter}, SGDOptions(1.));
    torchamp::clip_grad_norm_(optimizer, max_norm);
    expect_close(optimizer.next_step_divisor(), torch::full({}, (2. * max_norm + 1e-6) / max_norm));
  }
}

TEST(DeferredClips, ToALimitWhoseReciprocalFp32CannotHoldLeavesNothingToStepWith) {
  for (const double max_norm : {0., 1e-40}) {
    for (const double gradient : {0., 2.}) {
      SCOPED_TRACE(testing::Message() << max_norm << ", gradient " << gradient);
      const Tensor parameter = with_gradient(torch::full({3}, gradient));
      torchamp::FusedSGD optimizer(Params{parameter}, SGDOptions(1.));
      torchamp::clip_grad_norm_(optimizer, max_norm);
      optimizer.step();
      expect_close(parameter, torch::zeros({3}));
    }
  }
}

TEST(DeferredClips, IsRefusedForASecondClipOrUnscalingOfChangedGradients) {
  Clipped clipped;
  clipped.params[1].grad().add_(1.);
  EXPECT_ERROR(torchamp::clip_grad_norm_(clipped.optimizer, 1.), "are not those that");
  EXPECT_ERROR(torchamp::clip_grad_value_(clipped.optimizer, 1.), "are not those that");
  torchamp::GradScaler scaler({.init_scale = 4.});
  scaler.scale(torch::ones({}));
  EXPECT_ERROR(scaler.unscale_(clipped.optimizer), "are not those that");
  EXPECT_ERROR(scaler.step(clipped.optimizer), "are not those that");
  expect_close(clipped.params[0].grad(), torch::full({4}, 3.));
}

TEST(DeferredClips, IsDroppedWithItsGradients) {
  const std::vector<std::function<void(Clipped&)>> drops{
      [](Clipped& c) { c.optimizer.zero_grad(); },
      [](Clipped& c) { c.optimizer.zero_grad(/*set_to_none=*/false); },
      [](Clipped& c) { static_cast<Optimizer&>(c.optimizer).zero_grad(); },
      [](Clipped& c) {
        for (Tensor& p : c.params) p.mutable_grad().reset();
      }};
  for (std::size_t i = 0; i < drops.size(); ++i) {
    for (const bool clips_again : {false, true}) {
      SCOPED_TRACE(c10::str(i, clips_again));
      Clipped clipped;
      drops[i](clipped);
      (clipped.params[0].sum() * 3. + clipped.params[1].sum() * 2.).backward();
      if (clips_again) {
        expect_close(torchamp::clip_grad_norm_(clipped.optimizer, 4.), torch::full({}, 8.));
      }
      clipped.optimizer.step();
      expect_close(clipped.params[0], torch::full({4}, clips_again ? -1.5 : -3.));
      expect_close(clipped.params[1], torch::full({7}, clips_again ? -1. : -2.));
    }
  }
}

TEST(DeferredClips, IsDroppedByAStepWithoutGradients) {
  Clipped clipped;
  for (Tensor& p : clipped.params) p.mutable_grad().reset();
  clipped.optimizer.step();
  for (Tensor& p : clipped.params) p.mutable_grad() = torch::ones_like(p);
  clipped.optimizer.step();
  expect_close(clipped.params[0], torch::full({4}, -1.));
}

TEST(DeferredClips, StaysWithGradientsThatTheScalerChecksOrUnscales) {
  for (const bool recheck : {false, true}) {
    for (const bool unscales : {false, true}) {
      Clipped clipped;
      for (const Tensor& p : clipped.params) p.grad().mul_(16.);
      clipped.optimizer.take_next_step_divisor();
      torchamp::GradScaler scaler({.init_scale = 16., .recheck = recheck});
      scaler.scale(torch::ones({}));
      torchamp::clip_grad_norm_(scaler, clipped.optimizer, 4.);
      if (unscales) scaler.unscale_(clipped.optimizer);
      scaler.step(clipped.optimizer);
      expect_close(clipped.params[0], torch::full({4}, -1.5));
    }
  }
}

TEST(DeferredClipsSimulated, StaysWithGradientsThatAreUnscaledOnceThereIsMemory) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const Tensor parameter = torch::ones({4}, simulated::on(simulated::sim0)).requires_grad_();
  torchamp::FusedSGD optimizer({parameter}, SGDOptions(0.5));
  torchamp::GradScaler scaler({.init_scale = 8.});
  scaler.scale((parameter * 3.).sum()).backward();
  torchamp::clip_grad_norm_(scaler, optimizer, 1.);
  int failures = 0;
  for (bool fails = true; fails; failures += fails ? 1 : 0) {
    ASSERT_LT(failures, 20);
    try {
      const simulated::AllocationLimit limit(failures);
      scaler.unscale_(optimizer);
      fails = false;
    } catch (const c10::OutOfMemoryError&) {
      EXPECT_TRUE(parameter.grad().eq(24.).all().item<bool>()) << "not divided yet";
    }
  }
  EXPECT_GT(failures, 0);
  scaler.step(optimizer);
  expect_close(parameter.detach(), torch::full({4}, 0.75, parameter.options()));
}

TEST(DeferredClipsSimulated, OfZeroStaysZeroInASecondClip) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const auto options = simulated::on(simulated::sim0, at::kFloat);
  for (const bool is_second : {false, true}) {
    const Tensor p = torch::zeros({3}, options).requires_grad_();
    torchamp::FusedSGD optimizer({p}, SGDOptions(1.));
    torchamp::GradScaler scaler({.init_scale = 4.});
    scaler.scale(p.sum()).backward();
    for (const double limit : {is_second ? 1. : 0., is_second ? 0. : 1.}) {
      torchamp::clip_grad_norm_(scaler, optimizer, limit);
    }
    EXPECT_TRUE(scaler.step(optimizer)) << "a gradient of zeros is finite";
    expect_close(p.cpu(), torch::zeros({3}));
  }
}

}  // namespace
