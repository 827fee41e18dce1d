// SPDX-License-Identifier: BSD-3-Clause
// Captures that fail leave a program that goes on.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "simulated_device/memory.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/graph_training.h"
#include "support/optimizer_kinds.h"

namespace {

using FailedCapture = CapturedTraining;
INSTANTIATE_TEST_SUITE_P(CudaGraph, FailedCapture, ::testing::Values(at::kCUDA, at::kPrivateUse1),
                         device_name);

class CaptureWithoutMemory : public FailedCapture {};

INSTANTIATE_TEST_SUITE_P(CudaGraph, CaptureWithoutMemory, simulated_device(), device_name);

TEST_P(FailedCapture, SaysWhenAnEarlierStepsAutogradGraphIsAlive) {
  Training training(GetParam());
  const at::Tensor loss =
      torch::mse_loss(training.net->forward(training.batch(0)[0]), training.batch(0)[1]);
  loss.backward({}, /*retain_graph=*/true);  // its nodes belong to the caller's stream
  const auto graph = graph_of(training, {.warmup = 1});
  (*graph)(training.batch(0));
#if TORCH_VERSION_MINOR >= 15
  EXPECT_ERROR(
      (*graph)(training.batch(1)),
      "The usual reason is an autograd graph of an earlier eager step that is still alive");
#else  // on the simulated device, 2.11 accumulates gradients on the stream that they come from
  if (GetParam() == at::kPrivateUse1) {
    EXPECT_NO_THROW((*graph)(training.batch(1)));
  }
#endif
}

TEST_P(FailedCapture, ACaptureThatFailedIsNoStep) {
  const auto steps_after = [&](bool fails) {
    const at::Tensor weight = torch::ones({4}, here()).requires_grad_();
    torchamp::FusedAdam optimizer({weight}, AdamOptions(Training::lr));
    const auto graph = graph_of(optimizer,
                                [&](const Tensors& batch) {
                                  optimizer.zero_grad();
                                  (weight * batch[0]).sum().backward();
                                  optimizer.step();  // without a scaler: each step is taken
                                  if (std::exchange(fails, false)) throw std::runtime_error("mine");
                                  return weight.sum();
                                },
                                {.warmup = 1});
    const Tensors batch{torch::ones({4}, here())};
    if (fails) {
      fails = false;
      (*graph)(batch);
      fails = true;
      EXPECT_THROW((*graph)(batch), std::runtime_error);
    } else {
      (*graph)(batch);
    }
    const auto steps = [&] {
      const auto& state = *optimizer.state().begin()->second;
      return static_cast<const torch::optim::AdamParamState&>(state).step();
    };
    const int64_t first = steps();
    for (int i = 0; i < 3; ++i) (*graph)(batch);
    return std::tuple(first, steps(), weight.detach().cpu());
  };
  const auto [first, last, weight] = steps_after(true);
  const auto [first_expected, last_expected, weight_expected] = steps_after(false);
  EXPECT_EQ(first, first_expected);
  EXPECT_EQ(last, last_expected);
  EXPECT_TRUE(at::equal(weight, weight_expected));
}

TEST_P(FailedCapture, ACaptureThatFailedLeavesNoGradientsWithoutValues) {
  const at::Tensor weight = torch::ones({4}, here()).requires_grad_();
  const at::Tensor kept = torch::ones({4}, here()).requires_grad_();
  torchamp::FusedSGD optimizer({weight, kept}, SGDOptions(0.125));
  bool fails = false;
  const auto graph = graph_of(optimizer,
                              [&](const Tensors& batch) {
                                weight.mutable_grad().reset();
                                kept.mutable_grad().zero_();
                                ((weight + kept) * batch[0]).sum().backward();
                                optimizer.step();
                                TORCH_CHECK(!fails, "mine");
                                return weight.sum();
                              },
                              {.warmup = 1});
  kept.mutable_grad() = torch::zeros({4}, here());
  const Tensors batch{torch::full({4}, 3., here())};
  (*graph)(batch);
  fails = true;
  EXPECT_ERROR((*graph)(batch), "mine");
  EXPECT_FALSE(weight.grad().defined()) << "made in the capture";
  EXPECT_TRUE(kept.grad().cpu().eq(3.).all().item<bool>()) << "as before";
}

TEST_P(FailedCapture, AWarmUpThatThrowsLeavesWhatItMadeToTheCallersStream) {
  const at::Tensor weight = torch::ones({4}, here()).requires_grad_();
  torchamp::FusedSGD optimizer({weight}, SGDOptions(0.125));
  const bool fails = true;
  const auto graph = graph_of(optimizer, [&](const Tensors& batch) {
    (weight * batch[0]).sum().backward();
    TORCH_CHECK(!fails, "mine");
    return weight.sum();
  });
  EXPECT_ERROR((*graph)({torch::full({4}, 3., here())}), "mine");
  EXPECT_TRUE(weight.grad().mul(2.).cpu().eq(6.).all().item<bool>());
}

TEST_P(FailedCapture, ForgetsACaptureThatTurnsOutToBeInvalidAtItsEnd) {
  Training eager(GetParam()), captured(GetParam());
  bool waits = false;
  const auto graph =
      graph_of(*captured.optimizer,
               [&](const Tensors& batch) {
                 const at::Tensor loss = captured.step(batch);
                 try {
                   if (waits) loss.item<double>();
                 } catch (const c10::Error&) {  // goes on as if it had not been refused
                 }
                 return loss;
               },
               {.warmup = 1});
  const Tensors& outputs = (*graph)(captured.batch(0));
  eager.step(eager.batch(0));
  waits = true;
  EXPECT_ERROR((*graph)(captured.batch(1)), "CudaGraph: the iteration cannot be captured");
  EXPECT_TRUE(outputs.empty());
  waits = false;
  for (int i = 1; i < 5; ++i) {
    eager.step(eager.batch(i));
    (*graph)(captured.batch(i));
    expect_same(captured, eager);
  }
}

TEST_P(FailedCapture, AfterAFailureBetweenUnscaleAndStepDiscardLetsItGoOn) {
  Training eager(GetParam()), captured(GetParam());
  bool fails = false;
  const auto step = [](Training& training, const Tensors& batch, bool fail) {
    training.optimizer->zero_grad();
    const at::Tensor loss = torch::mse_loss(training.net->forward(batch[0]), batch[1]);
    training.scaler.scale(loss).backward();
    training.scaler.unscale_(*training.optimizer);
    TORCH_CHECK(!fail, "mine");
    torchamp::clip_grad_norm_(training.net->parameters(), 1.);
    training.scaler.step(*training.optimizer);
    training.scaler.update();
    return loss;
  };
  const auto graph =
      graph_of(*captured.optimizer,
               [&](const Tensors& batch) { return step(captured, batch, fails); }, {.warmup = 1});
  for (int i = 0; i < 6; ++i) {
    if (i == 1) {
      fails = true;
      EXPECT_ERROR((*graph)(captured.batch(i)), "mine");
      fails = false;
      captured.scaler.discard(*captured.optimizer);
    }
    step(eager, eager.batch(i), false);
    (*graph)(captured.batch(i));
    expect_same(captured, eager);
  }
}

/// Captures that lack memory, one after another, each for one allocation more than the last one's,
/// and then one that does not.
TEST_P(CaptureWithoutMemory, GoesOnAfterItsInputsDidNotFitIntoMemory) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured);
  for (int more = 0; more < 2; ++more) {
    const Tensors batch = captured.batch(0);
    const simulated::AllocationLimit limit(more);
    EXPECT_THROW((*graph)(batch), c10::OutOfMemoryError);
  }
  step_both(eager, captured, *graph, 0);
}

TEST_P(CaptureWithoutMemory, GoesOnAfterCapturesThatRanOutOfMemoryAnywhere) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured, {.warmup = 1});
  eager.step(eager.batch(0));
  (*graph)(captured.batch(0));
  const c10::Stream stream = backend().getStream(captured.device);
  const std::size_t before = simulated::bytes_in_use(0);
  const Tensors batch = captured.batch(1);
  int failures = 0;
  for (bool fails = true; fails; ++failures) {
    ASSERT_LT(failures, 1000);
    SCOPED_TRACE(failures);
    const simulated::AllocationLimit limit(failures);
    try {
      (*graph)(batch);
      fails = false;
    } catch (const c10::OutOfMemoryError& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  testing::HasSubstr("CudaGraph: there is not enough memory to capture"));
      EXPECT_FALSE(graph->is_captured());
      EXPECT_FALSE(at::autocast::is_autocast_enabled(GetParam()));
      EXPECT_EQ(backend().getStream(captured.device), stream);
      EXPECT_LE(simulated::bytes_in_use(0), before + batch[0].nbytes());
    }
  }
  EXPECT_GT(failures, 40);
  for (int i = 1; i < 8; ++i) {
    eager.step(eager.batch(i));
    if (i > 1) (*graph)(captured.batch(i));
    expect_same(captured, eager);
  }
}

}  // namespace
