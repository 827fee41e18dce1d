// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/optimizer_kinds.h"

// What the tests of ShardedMasterWeights train.
namespace sharded {

using at::Tensor;

/// Of sizes that no number of processes divides, with a norm that stays fp32.
struct NetImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor hidden = norm(first(x.to(first->weight.scalar_type())).to(at::kFloat));
    return last(hidden.to(last->weight.scalar_type())).to(at::kFloat);
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(5, 7))};
  torch::nn::LayerNorm norm{
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(7, 3))};
};
TORCH_MODULE(Net);

inline Net make_net(std::uint64_t seed = 1) {
  at::manual_seed(seed);
  return Net();
}

/// The batch of one process in one step, the same wherever it is made.
inline Tensor batch_of(int rank, int step) {
  at::manual_seed(static_cast<std::uint64_t>(1000 * step + rank + 7));
  return at::randn({6, 5});
}

inline Tensor loss_of(Net& net, const Tensor& batch) {
  return net->forward(batch).pow(2).mean();
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>;

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const std::vector<Tensor>& parameters) {
  Options options(0.05);
  if constexpr (std::is_same_v<Options, torch::optim::SGDOptions>) options.momentum(0.9);
  return std::make_unique<Optimizer>(parameters, options);
}

/// All fused optimizers that step shards, and some of LibTorch's. Names of fused ones begin with
/// "Fused".
inline const std::vector<std::pair<std::string, Make>>& kinds() {
  static const auto all = [] {
    std::vector<std::pair<std::string, Make>> made{
        {"FusedAdamW", make<torchamp::FusedAdamW, torch::optim::AdamWOptions>},
        {"FusedSGD", make<torchamp::FusedSGD, torch::optim::SGDOptions>},
        {"AdamW", make<torch::optim::AdamW, torch::optim::AdamWOptions>},
        {"RMSprop", make<torch::optim::RMSprop, torch::optim::RMSpropOptions>}};
    for (const Kind& kind : kinds_with_state()) {
      const auto is_same = [&](const auto& one) { return one.first == kind.optimizer; };
      if (!kind.is_elementwise || std::any_of(made.begin(), made.end(), is_same)) continue;
      made.emplace_back(kind.optimizer, kind.fused_of_parameters);
    }
    return made;
  }();
  return all;
}

/// Of the kind of this name.
inline Make maker_of(const std::string& name) {
  for (const auto& [kind, make] : kinds()) {
    if (kind == name) return make;
  }
  TORCH_CHECK(false, "no kind is called ", name);
}

inline void expect_same_bits(torch::nn::Module& a, torch::nn::Module& b) {
  const auto left = a.named_parameters(), right = b.named_parameters();
  for (const auto& item : left) {
    EXPECT_EQ(item.value().scalar_type(), right[item.key()].scalar_type());
    EXPECT_TRUE(at::equal(item.value(), right[item.key()])) << item.key();
  }
}

}  // namespace sharded
