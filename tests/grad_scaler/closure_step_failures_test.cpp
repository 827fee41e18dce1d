// SPDX-License-Identifier: BSD-3-Clause
// What a step with a closure that fails leaves behind, and what its errors say.
#include <torchamp/closure_step.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <memory>

#include "support/expect_error.h"
#include "support/non_finite.h"
#include "support/optimizers.h"
#include "support/tolerances.h"
#include "support/warnings.h"

using torch::optim::LBFGS;
using torchamp::GradScaler;
using torchamp::StepResult;

namespace {

/// Evaluates its loss twice in a step, and moves the parameters and its state in between.
struct TwoLooks : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    at::Tensor loss = closure();
    for (int i = 0; i < 2; ++i) {
      const torch::NoGradGuard no_grad;
      at::Tensor& p = param_groups()[0].params()[0];
      p.sub_(p.grad());
      state_[p.unsafeGetTensorImpl()] = std::make_unique<torch::optim::SGDParamState>();
      if (i == 0) loss = closure();
    }
    return loss;
  }
};

}  // namespace

TEST(GradScalerClosure, RestoresParametersAfterASkipAndAfterAnException) {
  const at::Tensor w = torch::ones({2}, torch::requires_grad());
  TwoLooks optimizer({w}, torch::optim::SGDOptions(1.));
  GradScaler scaler({.init_scale = 4.});
  int calls = 0;
  const auto loss = [&] { return (w * (++calls == 1 ? 1.F : kInf)).sum(); };
  EXPECT_FALSE(step(scaler, optimizer, loss));
  EXPECT_EQ(calls, 2);
  expect_close(w.detach(), torch::ones({2}));
  scaler.update();
  calls = -10;
  const auto before = scaler.state_dict();
  EXPECT_ERROR(step(scaler, optimizer,
                    [&] {
                      TORCH_CHECK(++calls < -8, "out of luck");
                      return w.sum();
                    }),
               "out of luck");
  expect_close(w.detach(), torch::ones({2}));
  EXPECT_EQ(scaler.state_dict(), before);
  EXPECT_TRUE(step(scaler, optimizer, [&] { return w.sum(); })) << "the failed call left no trace";
}

TEST(GradScalerClosure, LeavesAFusedOptimizersStateAndCountsToIt) {
  const at::Tensor w = torch::ones({4}).requires_grad_();
  const at::Tensor plain_w = torch::ones({4}).requires_grad_();
  torchamp::FusedAdam optimizer({w}, torch::optim::AdamOptions(0.1));
  torch::optim::Adam plain({plain_w}, torch::optim::AdamOptions(0.1));
  GradScaler scaler({.init_scale = 4.});
  GradScaler plain_scaler({.init_scale = 4.});
  for (int i = 0; i < 4; ++i) {
    if (i == 2) {
      optimizer.param_groups()[0].options().set_lr(0.1);
      const at::Tensor sparse = torch::ones({2, 1}).requires_grad_();
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({sparse}));
      const auto loss = [&] {
        const at::Tensor row = torch::zeros({1}, at::kLong);
        return w.sum() + at::embedding(sparse, row, -1, false, /*sparse=*/true).sum();
      };
      EXPECT_ERROR(step(scaler, optimizer, loss), "has a gradient of layout Sparse");
      optimizer.param_groups().pop_back();
      expect_close(w, plain_w);
    }
    step(scaler, optimizer, [&] { return (i + 1) * w.sum(); });
    scaler.update();
    step(plain_scaler, plain, [&] { return (i + 1) * plain_w.sum(); });
    plain_scaler.update();
    expect_close(w, plain_w);
  }
}

TEST(GradScalerClosure, NamesItsMisuse) {
  const at::Tensor w = torch::ones({2}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler scaler;
  EXPECT_ERROR(step(scaler, optimizer, nullptr), "the closure is empty");
  LBFGS needs_closure({w});
  EXPECT_ERROR(scaler.step(needs_closure),
               "LBFGS evaluates the loss by itself. Call step(scaler, optimizer, closure)");
  EXPECT_ERROR(step(scaler, optimizer, [&] { return at::Tensor(); }),
               "returned no loss of one element");
  EXPECT_ERROR(step(scaler, optimizer, [&] { return w * 2; }), "returned no loss of one element");
  scaler.scale(w.sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_ERROR(step(scaler, optimizer, [&] { return w.sum(); }), "leave unscale_ out");
  scaler.update();
  step(scaler, optimizer, [&] { return w.sum(); });
  EXPECT_ERROR(step(scaler, optimizer, [&] { return w.sum(); }), "has been stepped already");
}

TEST(GradScalerClosure, RefusesAClosureThatCallsBackward) {
  for (const bool enabled : {true, false}) {
    const at::Tensor w = torch::ones({2}, torch::requires_grad());
    auto optimizer = sgd({w});
    GradScaler scaler({.enabled = enabled});
    const auto as_libtorch_wants_it = [&] {
      optimizer.zero_grad();
      at::Tensor loss = w.sum();  // a second backward of which is no error of LibTorch's
      scaler.scale(loss).backward();
      return loss;
    };
    EXPECT_ERROR(
        step(scaler, optimizer, as_libtorch_wants_it),
        "step(scaler, optimizer, closure): the closure has called backward(). Let it only compute");
    EXPECT_TRUE(at::equal(w, torch::ones({2})));
    EXPECT_TRUE(step(scaler, optimizer, [&] { return w.sum(); }));
    EXPECT_FALSE(at::equal(w, torch::ones({2})));
  }
}

TEST(GradScalerClosure, RefusesAClosureThatStepsOrUnscalesTheOptimizer) {
  const at::Tensor w = torch::ones({2}, torch::requires_grad());
  auto optimizer = sgd({w}), other = sgd({parameter_with(torch::ones({1}))});
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  scaler.step(other);
  const auto loss = [&] { return w.sum(); };
  const auto after = [&](const auto& call) {
    return [&] {
      call();
      return w.sum();
    };
  };
  const char* const asked = "Let it only compute and return the loss";
  EXPECT_ERROR(step(scaler, optimizer, after([&] { step(scaler, optimizer, loss); })), asked);
  EXPECT_ERROR(step(scaler, optimizer, after([&] { scaler.step(optimizer); })), asked);
  EXPECT_ERROR(step(scaler, optimizer, after([&] { scaler.unscale_(optimizer); })), asked);
  EXPECT_ERROR(step(scaler, optimizer, after([&] {
                      scaler.discard(optimizer);
                      scaler.step(optimizer);
                    })),
               asked);
  EXPECT_TRUE(at::equal(w, torch::ones({2})));
  EXPECT_FALSE(scaler.is_stepped(optimizer));
  EXPECT_TRUE(scaler.is_stepped(other));
  EXPECT_ERROR(step(scaler, optimizer, after([&] {
                      scaler.update();
                      scaler.step(optimizer);
                    })),
               asked);
  EXPECT_TRUE(step(scaler, optimizer, loss));
  scaler.update();
  EXPECT_TRUE(step(scaler, optimizer, loss));
}

TEST(GradScalerClosure, SaysThatTheLossNeedsNoGradient) {
  for (const bool enabled : {true, false}) {
    const at::Tensor w = torch::ones({2}, torch::requires_grad());
    auto optimizer = sgd({w});
    GradScaler scaler({.enabled = enabled});
    EXPECT_ERROR(
        step(scaler, optimizer, [&] { return w.detach().sum(); }),
        "step(scaler, optimizer, closure): the loss that the closure has returned, Float on "
        "cpu, does not require grad");
    EXPECT_TRUE(step(scaler, optimizer, [&] { return w.sum(); }));
  }
}

TEST(GradScalerClosure, NamesParametersThatTheLossDoesNotReach) {
  const at::Tensor w = torch::ones({2}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler scaler;
  const CollectedWarnings warnings;
  const StepResult result =
      step(scaler, optimizer, [] { return torch::ones({}, torch::requires_grad()) * 1; });
  EXPECT_FALSE(result);
  EXPECT_FALSE(result.had_gradients());
  EXPECT_EQ(result.missing_gradients().size(), 1U);
  scaler.update();
}
