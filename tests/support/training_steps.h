// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "torchamp/optim.h"

// What the tests of TrainingStep train.
namespace training_steps {

using at::Tensor;

struct NetImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return last(norm(first(x)).relu()); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(6, 8))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(8))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(8, 1))};
};
TORCH_MODULE(Net);

/// The same net each time.
inline Net make_net(at::Device device) {
  at::manual_seed(3);
  return to_device(Net(), device.is_cpu() ? device : at::Device(device.type(), 0));
}

/// Inputs and targets; the same each time.
inline std::vector<Tensor> batch_of(at::Device device, int number, bool overflows = false) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(number));
  Tensor x = at::randn({4, 6}, generator), y = at::randn({4, 1}, generator);
  if (overflows) y.fill_(std::numeric_limits<float>::infinity());
  return {x.to(device), y.to(device)};
}

inline Tensor loss_of(Net& net, const std::vector<Tensor>& batch) {
  return (net->forward(batch[0]) - batch[1]).pow(2).mean();
}

using Make = std::unique_ptr<torch::optim::Optimizer> (*)(std::vector<Tensor>);

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(std::vector<Tensor> parameters) {
  Options options(0.02);
  if constexpr (requires { options.momentum(0.9); }) options.momentum(0.9);
  return std::make_unique<Optimizer>(std::move(parameters), options);
}

inline const std::vector<std::pair<std::string, Make>>& kinds() {
  static const std::vector<std::pair<std::string, Make>> all{
      {"FusedAdamW", make<torchamp::FusedAdamW, torch::optim::AdamWOptions>},
      {"FusedSGD", make<torchamp::FusedSGD, torch::optim::SGDOptions>},
      {"AdamW", make<torch::optim::AdamW, torch::optim::AdamWOptions>},
      {"SGD", make<torch::optim::SGD, torch::optim::SGDOptions>}};
  return all;
}

inline void expect_same_tensors(const torch::OrderedDict<std::string, Tensor>& a,
                                const torch::OrderedDict<std::string, Tensor>& b) {
  for (const auto& item : a) {
    EXPECT_TRUE(at::equal(item.value().detach().cpu(), b[item.key()].detach().cpu())) << item.key();
  }
}

/// Not what forward passes leave in buffers.
inline void expect_same_weights(const Net& a, const Net& b) {
  expect_same_tensors(a->named_parameters(), b->named_parameters());
}

/// Weights and buffers.
inline void expect_same_bits(const Net& a, const Net& b) {
  expect_same_weights(a, b);
  expect_same_tensors(a->named_buffers(), b->named_buffers());
}

}  // namespace training_steps
