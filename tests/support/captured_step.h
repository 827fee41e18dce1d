// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>

#include "support/devices.h"
#include "support/graph_registry.h"
#include "support/graph_training.h"
#include "support/training_steps.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/training_step.h"

/// Two trainings of the same net, by TrainingSteps: `eager`, and `captured` with some options.
template <class Optimizer = torchamp::FusedAdamW, class Options = torch::optim::AdamWOptions>
struct StepTwins {
  using Net = training_steps::Net;
  static constexpr double lr = 1. / 128;  // one of fp32, as captured steps take it

  struct Twin {
    Twin(at::DeviceType device, torchamp::TrainingStepOptions options)
        : net(training_steps::make_net(device)),
          optimizer(net->parameters(), Options(lr)),
          train(net, optimizer, std::move(options)) {}
    Net net;
    Optimizer optimizer;
    torchamp::TrainingStep train;
  };

  static torchamp::TrainingStepOptions options(torchamp::TrainingStepOptions more) {
    more.dtype = at::kHalf;
    more.scaler = torchamp::GradScalerOptions{.init_scale = 1024., .growth_interval = 3};
    more.max_grad_norm = 0.5;
    return more;
  }

  StepTwins(at::DeviceType where, CudaGraphOptions capture, torchamp::TrainingStepOptions more = {})
      : device(where), eager(where, options(more)), captured(where, [&] {
          more.capture = std::move(capture);
          return options(std::move(more));
        }()) {}
  ~StepTwins() {  // what warm-ups make is memory of a graph's stream
    if (device != at::kCPU) c10::impl::VirtualGuardImpl(device).synchronizeDevice(0);
  }
  StepTwins(const StepTwins&) = delete;
  StepTwins& operator=(const StepTwins&) = delete;

  /// `loss(net, inputs)` for both, which must then agree. Counts the calls of the captured one.
  template <class Loss>
  void step(const Tensors& batch, const Loss& loss) {
    const auto expected =
        eager.train(batch, [&](const Tensors& in) { return loss(eager.net, in); });
    const auto result = step_captured(batch, loss);
    expect_same(result.loss_tensor(), expected.loss_tensor());
    EXPECT_EQ(result.ended_window(), expected.ended_window());
    EXPECT_EQ(result.stepped(), expected.stepped());
    expect_agreement();
  }
  /// That one alone.
  template <class Loss>
  torchamp::TrainingResult step_captured(const Tensors& batch, const Loss& loss) {
    return captured.train(batch, [&](const Tensors& in) {
      ++calls;
      return loss(captured.net, in);
    });
  }
  void step(const Tensors& batch) {
    step(batch, [](Net& net, const Tensors& in) { return training_steps::loss_of(net, in); });
  }
  void step(int number, bool overflows = false) {
    step(training_steps::batch_of(device, number, overflows));
  }

  void expect_agreement() {
    expect_same(captured.net->parameters(), eager.net->parameters());
    expect_same(captured.net->buffers(), eager.net->buffers());
    const auto a = captured.train.scaler().state_dict(), e = eager.train.scaler().state_dict();
    EXPECT_EQ(a.scale, e.scale);
    EXPECT_EQ(a.growth_tracker, e.growth_tracker);
  }
  /// The same to both.
  void both(const std::function<void(Twin&)>& change) {
    change(eager);
    change(captured);
  }

  at::DeviceType device;
  Twin eager, captured;
  int calls = 0;
};

class CapturedStepTest : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    if (GetParam() == at::kPrivateUse1) {
      SKIP_WITHOUT_GRAPH_REGISTRY();
    }
    torch::manual_seed(11);
  }
  at::TensorOptions here() const { return at::device(GetParam()).dtype(at::kFloat); }
  Tensors batch(int number) const { return training_steps::batch_of(GetParam(), number); }
};
