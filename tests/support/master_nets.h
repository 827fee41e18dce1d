// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cstddef>
#include <vector>

#include "torchamp/autocast.h"

// What the tests of MasterWeights train.
namespace master_nets {

using at::Tensor;

struct OwnNormImpl : torch::nn::Module {
  OwnNormImpl() : gain(register_parameter("gain", at::ones({4}))) {}
  Tensor forward(const Tensor& x) { return x * gain; }
  Tensor gain;
};
TORCH_MODULE(OwnNorm);

/// Layers that are kept narrow, norms of LibTorch's and of its own, and a frozen parameter.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : body(register_module("body", torch::nn::Linear(4, 4))),
        batch(register_module("batch", torch::nn::BatchNorm1d(4))),
        own(register_module("own", OwnNorm())),
        head(register_module("head", torch::nn::Linear(4, 2))),
        frozen(register_parameter("frozen", at::randn({4}), /*requires_grad=*/false)) {}
  Tensor forward(const Tensor& x) {
    return head->forward(own->forward(batch->forward(body->forward(x * frozen))));
  }
  torch::nn::Linear body;
  torch::nn::BatchNorm1d batch;
  OwnNorm own;
  torch::nn::Linear head;
  Tensor frozen;
};
TORCH_MODULE(Net);

inline std::vector<Tensor> clones(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

inline void expect_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

inline Tensor loss_of(Net& net, const Tensor& x, at::ScalarType dtype = at::kBFloat16) {
  const torchamp::AutocastGuard autocast(at::kCPU, dtype);
  return net->forward(x).to(at::kFloat).pow(2).mean();
}

}  // namespace master_nets
