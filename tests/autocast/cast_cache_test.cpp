// SPDX-License-Identifier: BSD-3-Clause
// What guards keep of weights in a program that includes neither torchamp/weight_cache.h nor fp8.h.
#include "torchamp/cast_cache.h"

#include <ATen/ops/mm.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "torchamp/autocast.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::WeightCache;

TEST(WeightCache, ValuesAreEqualThatKeepCastsAsLongInOneCache) {
  EXPECT_EQ(WeightCache::none, WeightCache(WeightCache::none));
  EXPECT_NE(WeightCache::none, WeightCache::libtorch);
  EXPECT_NE(WeightCache::region, WeightCache::libtorch);
}

TEST(WeightCache, ACastThatWasMadeBeforeAWriteIsForgottenOnDemand) {
  const at::Tensor x = torch::ones({1, 1});
  const at::Tensor w = torch::ones({1, 1}, torch::requires_grad());
  const AutocastGuard guard(at::kCPU, at::kBFloat16);
  EXPECT_EQ(at::mm(x, w).item<double>(), 1);
  *w.mutable_data_ptr<float>() = 2.F;  // calls no op
  EXPECT_EQ(at::mm(x, w).item<double>(), 1);
  torchamp::clear_weight_cache();
  EXPECT_EQ(at::mm(x, w).item<double>(), 2);
}

}  // namespace
