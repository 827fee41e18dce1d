// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/autocast.h"
#include "torchamp/weight_cache.h"

// What the tests of weight caches share.
namespace weight_caches {

using torchamp::AutocastGuard;
using torchamp::AutocastOptions;
using torchamp::WeightCache;

inline constexpr WeightCache own_caches[] = {WeightCache::region, WeightCache::window,
                                             WeightCache::kept};

inline AutocastOptions with(WeightCache cache, at::ScalarType dtype = at::kBFloat16) {
  return {.dtype = dtype, .cache = cache};
}

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const at::Tensor&)>;

/// The output of `function` under a guard, and the gradients of `inputs` and `weights`.
inline Tensors values_and_gradients(const AutocastOptions& options, const Function& function,
                                    const at::Tensor& input, const Tensors& weights) {
  Tensors wanted;
  for (const auto& weight : weights) {
    if (weight.requires_grad()) wanted.push_back(weight);
  }
  at::Tensor output;
  {
    const AutocastGuard guard(at::kCPU, options);
    output = function(input);
  }
  Tensors result{output.detach()};
  if (wanted.empty()) return result;
  for (auto& gradient : torch::autograd::grad({output.to(at::kFloat).pow(2).sum()}, wanted)) {
    result.push_back(std::move(gradient));
  }
  return result;
}

inline void expect_same(const Tensors& actual, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << what;
    EXPECT_TRUE(actual[i].equal(expected[i])) << what << ", " << i;
  }
}

class WeightCaches : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    torch::set_num_threads(1);  // the tensors are small
    torchamp::clear_weight_cache();
    before_ = torchamp::weight_cache_stats();
  }
  void TearDown() override { torchamp::clear_weight_cache(); }

  int64_t misses() const { return torchamp::weight_cache_stats().misses - before_.misses; }
  int64_t hits() const { return torchamp::weight_cache_stats().hits - before_.hits; }
  static int64_t bytes() { return torchamp::weight_cache_stats().bytes; }

  /// What the slow, plain path gives.
  static Tensors plain(const Function& function, const at::Tensor& input, const Tensors& weights,
                       at::ScalarType dtype = at::kBFloat16) {
    return values_and_gradients(with(WeightCache::none, dtype), function, input, weights);
  }

  /// Two calls with each cache equal the plain path.
  void expect_plain(const Function& function, const at::Tensor& input, const Tensors& weights,
                    const std::string& what) {
    const Tensors expected = plain(function, input, weights);
    for (const WeightCache cache : own_caches) {
      for (int i = 0; i < 2; ++i) {
        expect_same(values_and_gradients(with(cache), function, input, weights), expected, what);
      }
    }
  }

 private:
  torchamp::WeightCacheStats before_;
};

inline torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                               torch::nn::Linear(16, 4));
}

inline Function forward_of(torch::nn::Sequential& net) {
  return [&net](const at::Tensor& input) { return net->forward(input); };
}

}  // namespace weight_caches
