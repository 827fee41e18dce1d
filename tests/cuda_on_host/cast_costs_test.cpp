// SPDX-License-Identifier: BSD-3-Clause
// What casts of weights cost in LibTorch's real CUDA code. The table in
// examples/guide/contributors.md is what is counted here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda_on_host/stand_in.h"
#include "support/contributors_page.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/weights_together.h"
#include "torchamp/weight_cache.h"

namespace {

using torchamp::WeightCache;

std::uint64_t kernels() {
  StandInCounts counts;
  stand_in_counts(&counts);
  return counts.kernels;
}

/// Kernels of forward and backward of 50 linear layers in the third region.
std::string counted_line(const std::string& name, const WeightCache& cache) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 50; ++i) {
    parameters.push_back(at::ones({8, 8}, at::kCUDA).requires_grad_());
    parameters.push_back(at::ones({8}, at::kCUDA).requires_grad_());
  }
  const at::Tensor input = at::ones({4, 8}, at::TensorOptions(at::kCUDA).dtype(at::kHalf));
  std::uint64_t before = 0, between = 0, after = 0;
  for (int region = 0; region < 3; ++region) {
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    before = kernels();
    at::Tensor x = input;
    {
      const torchamp::AutocastGuard guard(at::kCUDA, {.dtype = at::kHalf, .cache = cache});
      for (std::size_t i = 0; i < parameters.size(); i += 2) {
        x = torch::linear(x, parameters[i], parameters[i + 1]);
      }
    }
    between = kernels();
    x.backward(input);
    after = kernels();
  }
  return "| `" + name + "` | " + std::to_string(between - before) + " | " +
         std::to_string(after - between) + " |";
}

TEST(CastCosts, EqualTheGuide) {
  expect_on_contributors_page(counted_line("WeightCache::libtorch", WeightCache::libtorch));
  expect_on_contributors_page(counted_line("weights_together()", torchamp::weights_together()));
}

}  // namespace
