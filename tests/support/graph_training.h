// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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
    } else if (kind == "muon") {
      std::vector<at::Tensor> matrices;
      for (const at::Tensor& p : parameters) {
        if (p.dim() > 1) matrices.push_back(p);
      }
      optimizer = std::make_unique<torchamp::FusedMuon>(matrices, torchamp::MuonOptions(lr));
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
      const torchamp::AutocastGuard autocast(device.type(), {.policy = policy, .cache = cache});
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
  std::optional<torchamp::Policy> policy;  // none: the standard one
  torchamp::WeightCache cache = torchamp::WeightCache::libtorch;
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

/// CUDA's kernels may add in another order from run to run; the simulated device's do not.
inline void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.device().type() != at::kPrivateUse1) return expect_close(actual, expected);
  const at::Tensor a = actual.detach().cpu(), e = expected.detach().cpu();
  ASSERT_EQ(a.scalar_type(), e.scalar_type());
  EXPECT_TRUE(at::equal(a, e)) << "largest difference: "
                               << (a.to(at::kDouble) - e.to(at::kDouble)).abs().max();
}

inline void expect_same(const std::vector<at::Tensor>& actual,
                        const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(actual[i], expected[i]);
  }
}

inline void expect_same(const Training& actual, const Training& expected) {
  expect_same(actual.net->parameters(), expected.net->parameters());
  expect_same(actual.net->buffers(), expected.net->buffers());
  const auto a = actual.scaler.state_dict(), e = expected.scaler.state_dict();
  EXPECT_EQ(a.scale, e.scale);
  EXPECT_EQ(a.growth_tracker, e.growth_tracker);
}

class CapturedTraining : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    torch::manual_seed(11);
  }

  std::unique_ptr<CudaGraph> graph_of(torch::optim::Optimizer& optimizer, auto body,
                                      CudaGraphOptions options = {}) {
    return make_graph(GetParam(), {optimizer}, std::move(body), log_, options);
  }
  std::unique_ptr<CudaGraph> graph_of(Training& training, CudaGraphOptions options = {}) {
    return graph_of(
        *training.optimizer, [&](const Tensors& batch) { return training.step(batch); }, options);
  }
  c10::impl::VirtualGuardImpl backend() const { return c10::impl::VirtualGuardImpl(GetParam()); }
  at::TensorOptions here() const { return at::device(GetParam()).dtype(at::kFloat); }

  Repeater::Log log_;  // of nothing
};
