// SPDX-License-Identifier: BSD-3-Clause
// Captured steps, and others of the same optimizer.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "support/devices.h"
#include "support/graph_training.h"
#include "support/optimizer_kinds.h"

namespace {

using CapturedSteps = CapturedTraining;
INSTANTIATE_TEST_SUITE_P(CudaGraph, CapturedSteps, ::testing::Values(at::kCUDA, at::kPrivateUse1),
                         device_name);

/// Steps `eager`, and `captured` by `graph`, but for one eager step between its replays, and calls
/// `check` after each.
void expect_same_steps(
    Training& eager, Training& captured, CudaGraph& graph,
    const std::function<void()>& check = [] {}) {
  for (int i = 0; i < 9; ++i) {
    eager.step(eager.batch(i));
    if (i == 5) {
      captured.step(captured.batch(i));
    } else {
      graph(captured.batch(i));
    }
    expect_same(captured, eager);
    check();
  }
}

TEST_P(CapturedSteps, AnEagerStepBetweenReplaysIsOneOfThem) {
  Training eager(GetParam()), captured(GetParam());
  expect_same_steps(eager, captured, *graph_of(captured, {.warmup = 1}));
}

TEST_P(CapturedSteps, AnEagerStepWithoutSomeGradientsHasTheNextIterationsCapturedAnew) {
  for (const char* kind : {"adam", "sgd"}) {
    SCOPED_TRACE(kind);
    Training eager(GetParam(), kind), captured(GetParam(), kind);
    const auto graph = graph_of(captured, {.warmup = 1});
    for (int i = 0; i < 11; ++i) {
      SCOPED_TRACE(i);
      for (Training* const training : {&eager, &captured}) {
        if (i == 7) training->optimizer->param_groups()[0].options().set_lr(Training::lr / 2);
        if (i == 4) {  // without the first parameter's
          training->optimizer->zero_grad();
          const at::Tensor out = training->net->forward(training->batch(i)[0]);
          training->scaler.scale(out.pow(2).mean()).backward();
          training->net->parameters()[0].mutable_grad().reset();
          training->scaler.step(*training->optimizer);
          training->scaler.update();
        } else if (training == &eager) {
          eager.step(eager.batch(i));
        } else {
          (*graph)(captured.batch(i));
        }
      }
      expect_same(captured, eager);
      EXPECT_EQ(graph->is_captured(), i > 0 && i != 5);
    }
    EXPECT_EQ(captured.calls, 4) << "two warm-ups and two captures";
  }
}

TEST_P(CapturedSteps, TwoGraphsMayStepDifferentParametersOfOneOptimizer) {
  const auto trained = [&](bool by_graphs) {
    const at::Tensor a = torch::ones({4}, here()).requires_grad_();
    const at::Tensor b = torch::ones({4}, here()).requires_grad_();
    torchamp::FusedAdam optimizer({a, b}, AdamOptions(Training::lr));
    const auto iteration = [&](bool of_both) {
      return graph_of(optimizer,
                      [&optimizer, of_both, a, b](const Tensors& batch) {
                        optimizer.zero_grad();
                        const at::Tensor loss = (of_both ? a * b : a) * batch[0];
                        loss.sum().backward();
                        optimizer.step();
                        return loss;
                      },
                      {.warmup = 1, .enabled = by_graphs});
    };
    const auto of_both = iteration(true), of_one = iteration(false);
    for (int i = 0; i < 10; ++i) {
      if (i == 8) optimizer.param_groups()[0].options().set_lr(2 * Training::lr);
      (*(i % 4 < 2 ? of_both : of_one))({torch::full({4}, 1. + i, here())});
    }
    c10::impl::VirtualGuardImpl(GetParam()).synchronizeDevice(0);
    return std::vector<at::Tensor>{a.detach().cpu(), b.detach().cpu()};
  };
  expect_same(trained(true), trained(false));
}

TEST_P(CapturedSteps, DropGradientsAsEagerOnesDo) {
  Training eager(GetParam()), captured(GetParam());
  for (Training* const training : {&eager, &captured}) {
    dynamic_cast<torchamp::FusedOptimizer&>(*training->optimizer).drop_gradients_after_step();
  }
  const auto graph = graph_of(captured, {.warmup = 1});
  expect_same_steps(eager, captured, *graph,
                    [&captured] { EXPECT_FALSE(captured.net->parameters()[0].grad().defined()); });
  EXPECT_TRUE(graph->is_captured());
}

}  // namespace
