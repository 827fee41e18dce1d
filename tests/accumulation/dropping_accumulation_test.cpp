// SPDX-License-Identifier: BSD-3-Clause
// What an Accumulation with drop_bad does after an error, what it adds and what it does not take.
#include <torchamp/accumulate.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/optim.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"
#include "support/tolerances.h"
#include "support/warnings.h"

using torchamp::GradScaler;

TEST(DroppingAccumulationAfterAnError, RepeatsTheSameStep) {
  for (const bool in_optimizer : {false, true}) {
    const at::Tensor w = zero();
    FailingSgd optimizer({w}, torch::optim::SGDOptions(1.));
    optimizer.fails = in_optimizer;
    GradScaler scaler({.init_scale = 4.});
    DroppingAccumulation accumulation(scaler, optimizer);
    for (int i = 0; i < 4; ++i) accumulation.backward((w * 8).sum());
    const auto failing = [&] {
      w.mutable_grad().mul_(0.5);
      if (!in_optimizer) throw std::runtime_error("mine");
    };
    for (int i = 0; i < 2; ++i) {
      EXPECT_THROW(accumulation.step(failing), std::runtime_error);
      EXPECT_EQ(accumulation.pending(), 4);
    }
    accumulation.backward((w * 3).sum());  // the window is open still
    optimizer.fails = false;
    const auto result = accumulation.step();
    EXPECT_EQ(result.kept(), 5);
    EXPECT_EQ(w.item<float>(), -7.F);
  }
}

TEST(DroppingAccumulationAfterAnError, DropsTheWindowOnRequest) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * 100).sum());
  EXPECT_THROW(accumulation.step([] { throw std::runtime_error("mine"); }), std::runtime_error);
  accumulation.discard();
  EXPECT_EQ(accumulation.pending(), 0);
  EXPECT_FALSE(w.grad().defined());
  EXPECT_FALSE(accumulation.flush());
  accumulation.backward((w * 3).sum());
  EXPECT_EQ(accumulation.step().kept(), 1);
  EXPECT_EQ(w.item<float>(), -3.F);
}

TEST(DroppingAccumulationAfterAnError, GoesOnAfterALimitOfTheScaler) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 8., .max_skips_in_a_row = 1});
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * 2).sum());
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(accumulation.backward((w * kInf).sum()), "1 consecutive iterations");
    EXPECT_EQ(accumulation.pending(), 1) << "as if it had not been given";
    EXPECT_FALSE(scaler.is_unscaled(optimizer));
  }
  accumulation.backward((w * 4).sum());
  EXPECT_EQ(accumulation.step().kept(), 2);
  EXPECT_EQ(w.item<float>(), -3.F);
}

TEST(DroppingAccumulationAfterAnError, GoesOnAfterAProcessThatCouldNotAgree) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  bool fails = true;
  GradScaler scaler({.agree_found_inf = [&](at::Tensor&) {
    if (fails) throw std::runtime_error("no network");
  }});
  DroppingAccumulation accumulation(scaler, optimizer);
  EXPECT_THROW(accumulation.backward((w * 2).sum()), std::runtime_error);
  fails = false;
  accumulation.backward((w * 2).sum());
  EXPECT_EQ(accumulation.step().kept(), 1);
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(DroppingAccumulation, RefusesWhatNoBackwardCanBeginAtAndKeepsItsWindow) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer, 2);
  accumulation.backward((w * 2).sum());
  EXPECT_ERROR(accumulation.backward(at::Tensor()), "Accumulation::backward: the loss is");
  EXPECT_ERROR(accumulation.backward(w.expand({2})),
               "Accumulation::backward: the loss has 2 element(s)");
  EXPECT_ERROR(accumulation.backward(at::ones({})),
               "the loss has 1 element(s), and requires_grad is 0. Pass one number");
  const auto result = accumulation.backward((w * 4).sum());
  ASSERT_TRUE(result);
  EXPECT_EQ(result->kept(), 2);
  EXPECT_EQ(w.item<float>(), -3.F);
}

// The weight after each call, and whether the call has stepped, of either accumulation.
template <typename Kind>
std::vector<std::pair<float, bool>> steps_of() {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 4.});
  Kind accumulation(scaler, optimizer, 2);
  accumulation.before_step([&] { torchamp::clip_grad_norm_(optimizer, 4.); });
  std::vector<std::pair<float, bool>> seen;
  const auto note = [&](const auto& result) {
    seen.emplace_back(w.item<float>(), result && result->stepped());
  };
  note(accumulation.flush());
  for (const double gradient : {2., 4., 8., 16., 2.}) {
    note(accumulation.backward((w * gradient).sum()));
  }
  accumulation.discard();
  note(accumulation.flush());
  EXPECT_EQ(accumulation.pending(), 0);
  return seen;
}

TEST(DroppingAccumulation, StepsAtTheSameTimesAsAnAccumulation) {
  EXPECT_EQ(steps_of<DroppingAccumulation>(), steps_of<torchamp::Accumulation>());
}

TEST(DroppingAccumulation, CountsDroppedMicroBatchesAndFlushesAnIncompleteWindow) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer, 3);
  EXPECT_FALSE(accumulation.backward((w * 2).sum()));
  EXPECT_FALSE(accumulation.backward((w * kInf).sum()));
  const auto result = accumulation.backward((w * 4).sum());
  ASSERT_TRUE(result);
  EXPECT_EQ(result->kept(), 2);
  EXPECT_EQ(result->dropped(), 1);
  EXPECT_EQ(w.item<float>(), -3.F);
  accumulation.backward((w * 5).sum());
  const auto rest = accumulation.flush();
  ASSERT_TRUE(rest);
  EXPECT_EQ(rest->micro_batches(), 1);
  EXPECT_EQ(w.item<float>(), -8.F) << "the mean of the kept ones, not a third";
  EXPECT_ERROR(DroppingAccumulation(scaler, optimizer, 0),
               "micro_batches is 0. It must be 1 or more.");
}

TEST(DroppingAccumulationAfterAnError, TakesNoMoreThanAWindow) {
  const at::Tensor w = zero();
  FailingSgd optimizer({w}, torch::optim::SGDOptions(1.));
  optimizer.fails = true;
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer, 2);
  accumulation.backward((w * 2).sum());
  EXPECT_THROW(accumulation.backward((w * 4).sum()), std::runtime_error);
  EXPECT_ERROR(accumulation.backward((w * 100).sum()), "the step with 2 of 2 micro-batches has");
  optimizer.fails = false;
  EXPECT_EQ(accumulation.flush()->kept(), 2);
  EXPECT_EQ(w.item<float>(), -3.F);
}

TEST(DroppingAccumulation, DropsAWindowWhoseFiniteGradientsAddUpToAnInf) {
  for (const bool fused : {false, true}) {
    for (const bool rule_on_device : {false, true}) {
      const at::Tensor w = zero();
      const auto optimizer = plain_or_fused_sgd({w}, fused);
      GradScaler scaler({.init_scale = 1.});
      scaler.scale(torch::ones({}));
      if (rule_on_device) move_to_device(scaler);
      DroppingAccumulation accumulation(scaler, *optimizer);
      for (int i = 0; i < 2; ++i) accumulation.backward((w * 2e38).sum());
      const auto result = accumulation.step();
      EXPECT_FALSE(result.stepped());
      EXPECT_EQ(result.kept(), 0);
      EXPECT_EQ(result.dropped(), 2);
      EXPECT_EQ(w.item<float>(), 0.F);
      accumulation.backward((w * 2).sum());
      EXPECT_EQ(accumulation.step().kept(), 1);
      EXPECT_EQ(w.item<float>(), -2.F);
    }
  }
}

TEST(DroppingAccumulation, CountsAMicroBatchWithoutGradientsAsDropped) {
  for (const bool enabled : {false, true}) {
    const at::Tensor w = zero(), other = zero();
    auto optimizer = sgd({w});
    GradScaler scaler({.enabled = enabled});
    DroppingAccumulation accumulation(scaler, optimizer);
    accumulation.backward((w * 4).sum());
    accumulation.backward(other.sum());
    const auto result = accumulation.step();
    EXPECT_EQ(result.kept(), 1);
    EXPECT_EQ(result.dropped(), 1);
    EXPECT_EQ(w.item<float>(), -4.F) << "the mean of one";

    const CollectedWarnings warnings;
    accumulation.backward(other.sum());
    EXPECT_FALSE(accumulation.step());
    EXPECT_EQ(w.item<float>(), -4.F);
    if (enabled) {
      EXPECT_NE(warnings.text().find("no parameter of this optimizer has a gradient"),
                std::string::npos);
    }
  }
}

TEST(DroppingAccumulation, IsClippedByEitherForm) {
  for (const bool fused : {false, true}) {
    for (const bool with_scaler : {false, true}) {
      SCOPED_TRACE(testing::Message() << fused << with_scaler);
      const at::Tensor w = torch::zeros({2}, torch::requires_grad());
      const auto optimizer = plain_or_fused_sgd({w}, fused);
      GradScaler scaler({.init_scale = 1024.});
      DroppingAccumulation accumulation(scaler, *optimizer);
      for (int i = 0; i < 3; ++i) accumulation.backward((w * torch::tensor({30.F, 40.F})).sum());
      at::Tensor norm;
      const auto clip = [&] {
        norm = with_scaler ? torchamp::clip_grad_norm_(scaler, *optimizer, 5.)
                           : torchamp::clip_grad_norm_(*optimizer, 5.);
      };
      // A clip that a failed step has left is not there when it is tried again.
      EXPECT_THROW(accumulation.step([&] {
        clip();
        throw std::runtime_error("mine");
      }),
                   std::runtime_error);
      accumulation.step(clip);
      EXPECT_NEAR(norm.item<float>(), 50.F, 1e-3);
      expect_close(w.detach(), torch::tensor({-3.F, -4.F}));

      for (int i = 0; i < 3; ++i) accumulation.backward((w * torch::tensor({30.F, 40.F})).sum());
      accumulation.step([&] {
        if (with_scaler) {
          torchamp::clip_grad_value_(scaler, *optimizer, 1.);
        } else {
          torchamp::clip_grad_value_(*optimizer, 1.);
        }
        EXPECT_ERROR(scaler.unscale_(*optimizer), "unscaled already");
      });
      expect_close(w.detach(), torch::tensor({-4.F, -5.F}));
    }
  }
}

TEST(DroppingAccumulation, ChecksTheMeanAgainAfterTheProgramIfAskedTo) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.recheck = true});
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * 2).sum());
  EXPECT_FALSE(accumulation.step([&] { w.mutable_grad().fill_(kInf); }));
  EXPECT_EQ(w.item<float>(), 0.F);
}

TEST(DroppingAccumulationAfterAnError, ForgetsTheClipOfAFailedStep) {
  const at::Tensor w = zero();
  torchamp::FusedSGD optimizer(std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1.));
  GradScaler scaler;
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * 8).sum());
  EXPECT_THROW(accumulation.step([&] {
    torchamp::clip_grad_norm_(optimizer, 1.);
    throw std::runtime_error("mine");
  }),
               std::runtime_error);
  EXPECT_TRUE(accumulation.step());
  EXPECT_EQ(w.item<float>(), -8.F);
}

TEST(DroppingAccumulationAfterAnError, AddsNothingIfALimitIsMetLate) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.max_skips_in_a_row = 1});
  scaler.scale(torch::ones({}));
  move_to_device(scaler);
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * kInf).sum());
  EXPECT_ERROR(accumulation.backward((w * 2).sum()), "1 consecutive iterations");
  EXPECT_EQ(accumulation.pending(), 1);
  EXPECT_FALSE(accumulation.step([&] { EXPECT_EQ(w.grad().item<float>(), 0.F); }));
  EXPECT_EQ(w.item<float>(), 0.F);
}

TEST(DroppingAccumulation, AddsGradientsOfOtherStrides) {
  const at::Tensor w = torch::zeros({2, 3}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer);
  const at::Tensor gradient = torch::arange(6.F).view({2, 3});
  for (const bool transposed : {false, true}) {
    accumulation.before_unscale([&] {
      if (transposed) w.mutable_grad() = torch::empty_strided({2, 3}, {1, 2}).copy_(gradient * 4);
    });
    accumulation.backward((w * gradient).sum());
  }
  EXPECT_TRUE(accumulation.step());
  expect_close(w.detach(), -gradient);
}

TEST(DroppingAccumulation, RefusesParametersThatChangeWithinAWindow) {
  const at::Tensor w = torch::zeros({4}, torch::requires_grad()), other = zero();
  auto optimizer = sgd({other, w});
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer);
  const auto loss = [&] { return (w * 2).sum() + other.sum(); };
  accumulation.backward(loss());
  const auto before = scaler.state_dict();
  for (const int64_t size : {2, 8}) {
    w.set_data(torch::zeros({size}));
    EXPECT_ERROR(accumulation.backward(loss()), "Accumulation::backward: 1 parameter(s)");
    EXPECT_ERROR(accumulation.step(), "Accumulation::flush: 1 parameter(s)");
  }
  w.set_data(torch::zeros({4}));
  accumulation.before_unscale([&] { w.mutable_grad() = torch::ones({1}); });
  EXPECT_ERROR(accumulation.backward(loss()), "the gradient Float [1] on cpu of parameter 1");
  accumulation.before_unscale(nullptr);
  auto& parameters = optimizer.param_groups()[0].params();
  std::swap(parameters[0], parameters[1]);
  EXPECT_ERROR(accumulation.backward(loss()), "2 parameter(s) of the optimizer were removed");
  parameters.pop_back();
  EXPECT_ERROR(accumulation.step(), "2 parameter(s) of the optimizer were removed");
  parameters = {other, w};
  EXPECT_EQ(accumulation.pending(), 1);
  EXPECT_EQ(scaler.state_dict(), before);
  accumulation.backward(loss());
  EXPECT_EQ(accumulation.step().kept(), 2);
  expect_close(w.detach(), torch::full({4}, -2.));
}

TEST(DroppingAccumulation, TakesParametersThatJoinWithinAWindow) {
  const at::Tensor w = zero(), late = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * 2).sum());
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({late}));
  accumulation.backward((w * 2 + late * 4).sum());
  EXPECT_EQ(accumulation.step().kept(), 2);
  EXPECT_EQ(w.item<float>(), -2.F);
  EXPECT_EQ(late.item<float>(), -2.F);
}

TEST(DroppingAccumulation, RefusesGradientsThatTheProgramUnscaled) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler;
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * 2).sum());
  scaler.scale(w.sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_ERROR(accumulation.backward((w * 2).sum()),
               "the gradients of this optimizer have been unscaled");
  EXPECT_ERROR(accumulation.step(),
               "Accumulation::flush: the gradients of this optimizer have been unscaled");
  scaler.update();
  EXPECT_EQ(accumulation.step().kept(), 1);
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(DroppingAccumulation, AddsGradientsWithTheConjugateBit) {
  for (const bool enabled : {false, true}) {
    const at::Tensor w = torch::zeros({1}, at::kComplexFloat).requires_grad_();
    auto optimizer = sgd({w});
    GradScaler scaler({.init_scale = 4., .enabled = enabled});
    DroppingAccumulation accumulation(scaler, optimizer);
    accumulation.before_unscale([&] { EXPECT_TRUE(w.grad().is_conj()); });
    for (int i = 0; i < 2; ++i) {
      const at::Tensor conjugate = torch::conj(w).resolve_conj();
      accumulation.backward((torch::view_as_real(conjugate) * torch::tensor({2.F, 3.F})).sum());
    }
    EXPECT_TRUE(accumulation.step());
    expect_close(torch::view_as_real(w.detach()), torch::tensor({{-2.F, 3.F}}));
  }
}
