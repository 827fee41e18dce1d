// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/autocast.h>
#include <torchamp/labs/module_policy.h>
#include <torchamp/labs/precision_audit.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"

/// A model with room for a planted weakness between two linear layers.
struct NetImpl : torch::nn::Module {
  using Weakness = std::function<at::Tensor(const at::Tensor&)>;

  explicit NetImpl(Weakness planted = nullptr) : weakness(std::move(planted)) {
    first = register_module("first", torch::nn::Linear(8, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    last = register_module("last", torchamp::WithPolicy<torch::nn::Linear>(16, 4));
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::dropout(norm(first(x)).tanh(), 0.25, is_training());
    if (weakness) y = weakness(y);
    return last(y);
  }

  Weakness weakness;
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torchamp::WithPolicy<torch::nn::Linear> last{nullptr};
};
TORCH_MODULE(Net);

inline Net net(NetImpl::Weakness weakness = nullptr, at::DeviceType device = at::kCPU) {
  torch::manual_seed(0);
  Net model(std::move(weakness));
  (void)to_device(model, device);
  return model;
}

inline std::function<void()> step_of(const Net& model) {
  const at::Tensor x = torch::randn({32, 8}).to(model->first->weight.device());
  return [model = model, x]() mutable {
    at::Tensor loss;
    {
      const torchamp::AutocastGuard autocast(x.device(), {.dtype = at::kBFloat16});
      loss = model(x).square().mean();
    }
    loss.backward();
  };
}

inline std::vector<at::Tensor> state_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> state;
  for (const auto& list : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : list) state.push_back(tensor.detach().clone());
  }
  return state;
}

inline void expect_same(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], other[i])) << i;
}
