// SPDX-License-Identifier: BSD-3-Clause
// What guards keep of weights in a program that includes neither torchamp/weight_cache.h nor fp8.h.
#include <ATen/ops/mm.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/expect_error.h"
#include "torchamp/autocast.h"
#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::WeightCache;

/// Whether two products of a region take one and the same cast of their weight.
bool share_a_cast(WeightCache cache) {
  const at::Tensor x = torch::ones({2, 3});
  const at::Tensor w = torch::ones({3, 4}, torch::requires_grad());
  const AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .cache = cache});
  const at::Tensor one = at::mm(x, w), other = at::mm(x, w);
  EXPECT_EQ(one.scalar_type(), at::kBFloat16);
  return one.grad_fn()->next_edge(1).function == other.grad_fn()->next_edge(1).function;
}

TEST(WeightCache, RegionIsLibtorchsWithoutTheHeaderOfTorchampsOwn) {
  ASSERT_EQ(torchamp::detail::registered_weight_casts, nullptr)
      << "a test of this room includes torchamp/weight_cache.h";
  EXPECT_TRUE(share_a_cast(WeightCache::libtorch));
  EXPECT_TRUE(share_a_cast(WeightCache::region));
  EXPECT_FALSE(share_a_cast(WeightCache::none));
}

TEST(WeightCache, AGuardWithALongOneThrowsWithoutTheHeader) {
  for (const WeightCache cache : {WeightCache::window, WeightCache::kept}) {
    EXPECT_ERROR((void)AutocastGuard(at::kCPU, {.cache = cache}),
                 "need torchamp/weight_cache.h. Include it in some source file.");
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(WeightCache, NothingElseIsKeptOrTold) {
  ASSERT_TRUE(share_a_cast(WeightCache::region));
  torchamp::clear_weight_cache();
  torchamp::weights_changed();
  torchamp::weights_changed(torch::ones({1}));
  EXPECT_EQ(torchamp::detail::kept_weights(), nullptr);
}

}  // namespace
