// SPDX-License-Identifier: BSD-3-Clause
// Tensors that are more than values and a gradient, under each cache.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <string>
#include <tuple>

#include "support/leaf.h"
#include "support/weight_caches.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/weights_together.h"
#include "torchamp/weight_cache.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::WeightCache;
using weight_caches::WeightCaches;
using weight_caches::with;

const WeightCache all_caches[] = {WeightCache::libtorch, WeightCache::region, WeightCache::window,
                                  WeightCache::kept, torchamp::weights_together()};

TEST_F(WeightCaches, PassTangentsOn) {
  const auto weight = leaf({4, 4}), other = leaf({4, 4});
  const auto frozen = torch::randn({4, 4});
  const auto input = torch::randn({3, 4});
  const auto tangent_with = [&](const WeightCache& cache) {
    const auto level = torch::autograd::ForwardADLevel::get_next_idx();
    at::Tensor tangent;
    {
      const auto direction = torch::ones({4, 4});
      const auto dual = at::_make_dual(weight, direction, level);
      const auto frozen_dual = at::_make_dual(frozen, direction, level);
      const AutocastGuard guard(at::kCPU, with(cache));
      const auto output = input.mm(dual.t()).mm(other.t()).mm(frozen_dual);
      tangent = std::get<1>(at::_unpack_dual(output, level)).detach().clone();
    }
    torch::autograd::ForwardADLevel::release_idx(level);
    return tangent;
  };
  const auto expected = tangent_with(WeightCache::none);
  for (const WeightCache& cache : all_caches) {
    for (int region = 0; region < 3; ++region) {
      EXPECT_TRUE(tangent_with(cache).equal(expected)) << region;
    }
  }
}

TEST_F(WeightCaches, TakeNestedTensorsWhoseGradientIsWanted) {
  const auto weight = leaf({4, 4});
  const auto nested =
      at::_nested_tensor_from_tensor_list({torch::randn({2, 4}), torch::randn({3, 4})})
          .detach()
          .set_requires_grad(true);
  const auto run = [&](const WeightCache& cache) {
    const AutocastGuard guard(at::kCPU, with(cache));
    return at::linear(at::linear(nested, weight), weight).detach();
  };
  const auto expected = run(WeightCache::none).unbind();
  for (const WeightCache& cache : all_caches) {
    for (int region = 0; region < 3; ++region) {
      const auto output = run(cache).unbind();
      ASSERT_EQ(output.size(), expected.size());
      EXPECT_TRUE(output[0].equal(expected[0]));
      EXPECT_TRUE(output[1].equal(expected[1]));
    }
  }
}

TEST_F(WeightCaches, LeaveTracesWithTheirWeights) {
  const auto input = torch::randn({3, 4});
  for (const WeightCache& cache : all_caches) {
    torch::jit::Module module("Layers");
    module.register_parameter("first", leaf({4, 4}), /*is_buffer=*/false);
    module.register_parameter("second", leaf({4, 4}), /*is_buffer=*/false);
    const auto forward = [&](const at::Tensor& x) {
      const auto hidden = at::linear(x, module.attr("first").toTensor());
      return at::linear(hidden, module.attr("second").toTensor());
    };
    for (int region = 0; region < 2; ++region) {
      const AutocastGuard guard(at::kCPU, with(cache));
      (void)forward(input);
    }
    const AutocastGuard guard(at::kCPU, with(cache));
    const auto traced = torch::jit::tracer::trace(
        {input},
        [&](torch::jit::Stack inputs) -> torch::jit::Stack {
          return {forward(inputs.at(0).toTensor())};
        },
        [](const torch::autograd::Variable&) { return std::string(); }, /*strict=*/true,
        /*force_outplace=*/false, &module);
    int weights = 0;
    for (const auto* const node : traced.first->graph->nodes()) {
      weights += node->kind() == torch::jit::prim::GetAttr;
    }
    EXPECT_EQ(weights, 2);
  }
}

}  // namespace
