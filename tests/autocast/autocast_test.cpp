// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "support/cpu_dtypes.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/tolerances.h"

namespace {

using cpu_dtypes::mm_dtype;
using cpu_dtypes::ones;
using torchamp::AutocastGuard;

static_assert(!std::is_copy_constructible_v<AutocastGuard>);
static_assert(!std::is_move_constructible_v<AutocastGuard>);
static_assert(!std::is_copy_assignable_v<AutocastGuard>);
static_assert(std::is_nothrow_destructible_v<AutocastGuard>);
static_assert(!std::is_convertible_v<at::DeviceType, AutocastGuard>);
static_assert(!std::is_default_constructible_v<AutocastGuard>);
static_assert(!std::is_convertible_v<at::Device, AutocastGuard>);
static_assert(!std::is_constructible_v<AutocastGuard, const char*>);
static_assert(!std::is_constructible_v<AutocastGuard, at::ScalarType>);

class AutocastGuardOn : public ::testing::TestWithParam<at::DeviceType> {};
INSTANTIATE_TEST_SUITE_P(Devices, AutocastGuardOn, all_devices(), device_name);

TEST_P(AutocastGuardOn, RunsMatmulInTheLowerPrecisionAndAdditionsAndReductionsInFp32) {
  const at::DeviceType device = GetParam();
  SKIP_WITHOUT(device);
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor x = ones(device, at::kFloat), lower = ones(device, dtype);
    const AutocastGuard autocast(device, dtype);
    EXPECT_EQ(x.mm(x).scalar_type(), dtype);
    EXPECT_EQ(at::linear(x, x).scalar_type(), dtype);
    EXPECT_EQ(at::conv1d(x.view({1, 4, 4}), x.view({4, 4, 1})).scalar_type(), dtype);
    EXPECT_EQ((lower + lower).scalar_type(), at::kFloat);
    EXPECT_EQ((lower - 1).scalar_type(), at::kFloat);
    EXPECT_EQ(at::rsub(lower, lower).scalar_type(), at::kFloat);
    EXPECT_EQ(lower.sum().scalar_type(), at::kFloat);
    EXPECT_EQ(lower.mean(0).scalar_type(), at::kFloat);
    EXPECT_EQ(lower.std(0).scalar_type(), at::kFloat);
    EXPECT_EQ(lower.softmax(0).scalar_type(), at::kFloat);
    EXPECT_EQ(lower.relu().scalar_type(), dtype);
    EXPECT_EQ(lower.amax().scalar_type(), dtype);
  }
}

TEST_P(AutocastGuardOn, TakesADtypeAndOptions) {
  const at::DeviceType device = GetParam();
  SKIP_WITHOUT(device);
  const at::Tensor x = ones(device, at::kFloat);
  const auto dtype_in = [&](const auto&... arguments) {
    const AutocastGuard autocast(arguments...);
    return x.mm(x).scalar_type();
  };
  const torchamp::AutocastOptions off{.enabled = false};
  const torchamp::AutocastOptions uncached{.cache = torchamp::WeightCache::none};
  const torchamp::AutocastOptions same{.dtype = at::kHalf}, other{.dtype = at::kBFloat16};
  EXPECT_EQ(dtype_in(device, at::kHalf, off), at::kFloat);
  EXPECT_EQ(dtype_in(device, at::kHalf, uncached), at::kHalf);
  EXPECT_EQ(dtype_in(at::Device(device, 0), at::kBFloat16, uncached), at::kBFloat16);
  EXPECT_EQ(dtype_in(device, at::kHalf, same), at::kHalf);
  EXPECT_ERROR(dtype_in(device, at::kHalf, other),
               "the dtype is Half as an argument and BFloat16 in the options");
  EXPECT_EQ(x.mm(x).scalar_type(), at::kFloat) << "no region is left";
  const AutocastGuard written(device, at::kHalf, {.cache = torchamp::WeightCache::none});
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
}

TEST_P(AutocastGuardOn, ComputesWhatCastsByHandCompute) {
  const at::DeviceType device = GetParam();
  SKIP_WITHOUT(device);
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  const at::Tensor x = at::linspace(-2, 2, 12, options).view({3, 4});
  const at::Tensor w = at::linspace(-1, 3, 20, options).view({5, 4});
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor by_hand = at::linear(x.to(dtype), w.to(dtype)).to(at::kFloat).add(1.F).mean();
    const AutocastGuard autocast(device, dtype);
    expect_close((at::linear(x, w) + 1.F).mean(), by_hand);
  }
}

TEST(AutocastGuard, GivesTheGradientsThatCastsByHandGive) {
  const at::Tensor x = at::linspace(-1, 1, 12).view({3, 4});
  const at::Tensor w = at::linspace(-1, 2, 8).view({4, 2}).requires_grad_();
  const at::Tensor w_by_hand = w.detach().clone().requires_grad_();
  {
    const AutocastGuard autocast(at::kCPU);
    const at::Tensor y = x.mm(w);
    (y + y).pow(2).mean().backward();
  }
  const at::Tensor y = x.to(at::kBFloat16).mm(w_by_hand.to(at::kBFloat16));
  (y.to(at::kFloat) + y).pow(2).mean().backward();
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(w.grad(), w_by_hand.grad()));
}

TEST(AutocastGuard, AnAdditionNeedsOneCastWhicheverArgumentDecides) {
  const at::Tensor matrix = ones(at::kCPU, at::kBFloat16), scalar = at::ones({}, at::kBFloat16);
  const at::Tensor wide_scalar = at::ones({}), integers = at::ones({4, 4}, at::kInt);
  const AutocastGuard autocast(at::kCPU);
  for (const auto& [a, b] :
       {std::pair(matrix, scalar), std::pair(scalar, matrix), std::pair(matrix, wide_scalar),
        std::pair(wide_scalar, matrix), std::pair(scalar, scalar), std::pair(integers, scalar)}) {
    EXPECT_EQ((a + b).scalar_type(), at::kFloat) << a.sizes() << " + " << b.sizes();
  }
  EXPECT_EQ((matrix + ones(at::kCPU, at::kDouble)).scalar_type(), at::kDouble);
  EXPECT_EQ((integers + integers).scalar_type(), at::kInt);
}

TEST(AutocastGuard, ADtypeThatTheCallerAsksForStands) {
  const at::Tensor x = ones(at::kCPU, at::kBFloat16);
  const AutocastGuard autocast(at::kCPU);
  EXPECT_EQ(x.sum(at::kDouble).scalar_type(), at::kDouble);
  EXPECT_EQ(x.softmax(0, at::kBFloat16).scalar_type(), at::kBFloat16);
}

TEST(AutocastGuard, NeverCastsFp64IntegersOrTensorsOfOtherDevices) {
  const AutocastGuard autocast(at::kCPU);
  EXPECT_EQ(ones(at::kCPU, at::kDouble).mm(ones(at::kCPU, at::kDouble)).scalar_type(), at::kDouble);
  EXPECT_EQ(ones(at::kCPU, at::kInt).sum().scalar_type(), at::kLong);
  const at::Tensor meta = ones(at::kMeta, at::kFloat);
  EXPECT_EQ(meta.mm(meta).scalar_type(), at::kFloat);
}

TEST(AutocastGuard, LeavesInPlaceAndOutFormsAlone) {
  at::Tensor x = ones(at::kCPU, at::kBFloat16), out = at::empty({4, 4}, at::kBFloat16);
  const AutocastGuard autocast(at::kCPU);
  EXPECT_EQ(x.add_(x).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::add_out(out, x, x).scalar_type(), at::kBFloat16);
}

TEST(AutocastGuard, ItsEndDropsCachedCastsThoughCodeInsideLeftALevelOpen) {
  const at::Tensor x = at::ones({2, 2}), weight = at::ones({2, 2}).requires_grad_();
  const auto product = [&] {
    const AutocastGuard autocast(at::kCPU);
    at::autocast::increment_nesting();  // by hand, and an exception before its end
    return x.mm(weight)[0][0].item<float>();
  };
  EXPECT_EQ(product(), 2);
  weight.detach().fill_(3);
  EXPECT_EQ(product(), 6);
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  at::autocast::decrement_nesting();
}

TEST(AutocastGuard, TheOutermostRegionsEndDropsTheCachedCasts) {
  const at::Tensor weight = ones(at::kCPU, at::kFloat).requires_grad_();
  c10::weak_intrusive_ptr<at::TensorImpl> cached(weight.getIntrusivePtr());
  {
    const AutocastGuard outer(at::kCPU);
    {
      const AutocastGuard inner(at::kCPU);
      cached = c10::weak_intrusive_ptr<at::TensorImpl>(
          at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU).getIntrusivePtr());
    }
    EXPECT_FALSE(cached.expired()) << "kept between the uses of a region";
    EXPECT_TRUE(at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU)
                    .is_same(at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU)));
  }
  EXPECT_TRUE(cached.expired());
}

TEST(AutocastGuard, ANestedRegionOfTheOther16BitDtypeCastsWeightsToItsOwn) {
  const at::Tensor weight = ones(at::kCPU, at::kFloat).requires_grad_();
  const at::Tensor x = ones(at::kCPU, at::kFloat);
  const AutocastGuard outer(at::kCPU, at::kBFloat16);
  EXPECT_EQ(x.mm(weight).scalar_type(), at::kBFloat16);
  {
    const AutocastGuard inner(at::kCPU, at::kHalf);
    EXPECT_EQ(x.mm(weight).scalar_type(), at::kHalf);
  }
  EXPECT_EQ(x.mm(weight).scalar_type(), at::kBFloat16);
}

TEST(AutocastGuard, AWeightWrittenToInARegionIsSeenAfterClearingTheCache) {
  const at::Tensor weight = ones(at::kCPU, at::kFloat).requires_grad_();
  const at::Tensor x = ones(at::kCPU, at::kFloat);
  const AutocastGuard autocast(at::kCPU);
  EXPECT_EQ(x.mm(weight)[0][0].item<float>(), 4);
  std::fill_n(weight.mutable_data_ptr<float>(), weight.numel(), 2.F);  // calls no op
  EXPECT_EQ(x.mm(weight)[0][0].item<float>(), 4) << "a limit, as documented";
  torchamp::clear_weight_cache();
  EXPECT_EQ(x.mm(weight)[0][0].item<float>(), 8);
}

TEST(AutocastGuard, AForwardWithoutGradientsBeforeATrainingForwardLosesNone) {
  if (TORCHAMP_LIBTORCH < 211) {
    GTEST_SKIP() << "LibTorch before 2.11 keeps casts that were made without gradients";
  }
  const at::Tensor weight = ones(at::kCPU, at::kFloat).requires_grad_();
  const AutocastGuard autocast(at::kCPU);
  {
    const at::NoGradGuard no_grad;
    (void)weight.mm(weight);
  }
  weight.mm(weight).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(AutocastGuard, EmptyBracesMeanTheDefaults) {
  const AutocastGuard autocast(at::kCPU, {});
  EXPECT_EQ(mm_dtype(), at::kBFloat16);
}

}  // namespace
