// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>

#include "support/devices.h"
#include "support/graphs.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

using torchamp::CudaGraph;
using torchamp::CudaGraphOptions;
using Tensors = CudaGraph::Tensors;

/// A small network that is trained as users train: guard, scaler, clipping, fused step.
struct Training {
  explicit Training(at::Device where, const std::string& kind = "adam")
      : device(where.type(), where.is_cpu() ? -1 : std::max<c10::DeviceIndex>(where.index(), 0)) {
    torch::manual_seed(7);
    net = torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                                torch::nn::ReLU(), torch::nn::Linear(8, 1));
    to_device(net, device);
    const auto parameters = net->parameters();
    if (kind == "adam") {
      optimizer = std::make_unique<torchamp::FusedAdam>(parameters, torch::optim::AdamOptions(lr));
    } else if (kind == "adamw") {
      optimizer = std::make_unique<torchamp::FusedAdamW>(
          parameters, torch::optim::AdamWOptions(lr).amsgrad(true));
    } else {
      optimizer = std::make_unique<torchamp::FusedSGD>(
          parameters, torch::optim::SGDOptions(4 * lr).momentum(0.9).nesterov(true));
    }
  }

  /// What warm-ups make is memory of a graph's stream: its last use must be over when it goes.
  ~Training() {
    if (!device.is_cpu()) {
      c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    }
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  at::Tensor step(const Tensors& batch) {
    ++calls;
    optimizer->zero_grad();
    at::Tensor loss;
    {
      const torchamp::AutocastGuard autocast(device.type());
      loss = torch::mse_loss(net->forward(batch[0]), batch[1]);
    }
    scaler.scale(loss).backward();
    torchamp::clip_grad_norm_(scaler, *optimizer, 0.5);
    scaler.step(*optimizer);
    scaler.update();
    return loss;
  }

  /// Batch `i`; every fifth one overflows.
  Tensors batch(int i) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + i);
    at::Tensor x = at::randn({4, 6}, generator), y = at::randn({4, 1}, generator);
    if (i % 5 == 3) y.fill_(std::numeric_limits<float>::infinity());
    return {x.to(device), y.to(device)};
  }

  static constexpr double lr = 1. / 128;  // one of fp32, as captured steps take it

  at::Device device;
  torch::nn::Sequential net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  torchamp::GradScaler scaler{{.init_scale = 1024., .growth_interval = 3}};
  int calls = 0;
};

/// A graph of `training`'s steps.
inline std::unique_ptr<CudaGraph> graph_of_steps(Training& training, Repeater::Log& log) {
  return make_graph(
      training.device.type(), {*training.optimizer},
      [&training](const Tensors& batch) { return training.step(batch); }, log);
}

inline void expect_equal_training(const Training& a, const Training& b) {
  const auto pa = a.net->parameters(), pb = b.net->parameters();
  for (std::size_t i = 0; i < pa.size(); ++i) expect_close(pa[i], pb[i]);
  const auto ba = a.net->buffers(), bb = b.net->buffers();
  for (std::size_t i = 0; i < ba.size(); ++i) expect_close(ba[i], bb[i]);
  EXPECT_EQ(a.scaler.get_scale(), b.scaler.get_scale());
}

/// Takes batch `i` to both, which must agree afterwards.
inline void step_both(Training& eager, Training& captured, CudaGraph& graph, int i) {
  eager.step(eager.batch(i));
  graph(captured.batch(i));
  expect_equal_training(captured, eager);
}
