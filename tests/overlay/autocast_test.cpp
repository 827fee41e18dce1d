// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/autocast.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/memory_meter.h"
#include "support/thread_state.h"
#include "support/tolerances.h"
#include "support/warnings.h"
#include "torchamp/autocast_state.h"
#include "torchamp/detail/overlay/thread_policy.h"

namespace {

using ::testing::HasSubstr;
using torchamp::AutocastGuard;
using torchamp::Policy;

static_assert(!std::is_copy_constructible_v<AutocastGuard>);
static_assert(!std::is_move_constructible_v<AutocastGuard>);
static_assert(!std::is_copy_assignable_v<AutocastGuard>);
static_assert(std::is_nothrow_destructible_v<AutocastGuard>);
static_assert(!std::is_convertible_v<at::DeviceType, AutocastGuard>);
static_assert(!std::is_default_constructible_v<AutocastGuard>);
static_assert(!std::is_convertible_v<at::Device, AutocastGuard>);
static_assert(!std::is_constructible_v<AutocastGuard, const char*>);
static_assert(!std::is_constructible_v<AutocastGuard, at::ScalarType>);

// A backend that is there: LibTorch's tests use such a guard for devices without hardware.
C10_REGISTER_GUARD_IMPL(MAIA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MAIA>)

at::Tensor ones(at::DeviceType device, at::ScalarType dtype) {
  return at::ones({4, 4}, at::TensorOptions(device).dtype(dtype));
}

at::ScalarType mm_dtype() {
  return ones(at::kCPU, at::kFloat).mm(ones(at::kCPU, at::kFloat)).scalar_type();
}
at::ScalarType add_dtype(at::ScalarType dtype) {
  return (ones(at::kCPU, dtype) + ones(at::kCPU, dtype)).scalar_type();
}

/// Leaves no part of the thread's state as it found it.
void disturb() {
  at::autocast::set_autocast_enabled(at::kCPU, !at::autocast::is_autocast_enabled(at::kCPU));
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  at::autocast::set_autocast_cache_enabled(!at::autocast::is_autocast_cache_enabled());
}

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

TEST(AutocastGuard, SetsTheStateAndRestoresIt) {
  const ThreadState before;
  {
    const AutocastGuard autocast(at::kCPU, {.dtype = at::kHalf, .cache_enabled = false});
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    EXPECT_EQ(ThreadState().nesting, before.nesting + 1);
    EXPECT_EQ(mm_dtype(), at::kHalf);
  }
  EXPECT_EQ(ThreadState(), before);
  EXPECT_EQ(mm_dtype(), at::kFloat);
  EXPECT_EQ(add_dtype(at::kHalf), at::kHalf);
}

TEST(AutocastGuard, RestoresWhatWasThereWhateverHappenedInside) {
  const ThreadState before;
  {
    const AutocastGuard autocast(at::kCPU);
    disturb();
  }
  EXPECT_EQ(ThreadState(), before);
  disturb();
  const ThreadState disturbed;
  {
    const AutocastGuard autocast(at::kCPU, {.dtype = at::kBFloat16, .enabled = false});
    disturb();
  }
  EXPECT_EQ(ThreadState(), disturbed);
  disturb();
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  EXPECT_EQ(ThreadState(), before);
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

TEST(AutocastGuard, RegionsThatEndOutOfOrderLeaveNoLevelOpen) {
  std::optional<torchamp::detail::AutocastRegion> outer, inner;
  outer.emplace(at::kCPU, std::nullopt, true, std::nullopt, std::nullopt, nullptr);
  inner.emplace(at::kCPU, std::nullopt, true, std::nullopt, std::nullopt, nullptr);
  outer.reset();
  inner.reset();
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  at::autocast::decrement_nesting();
  at::autocast::set_autocast_enabled(at::kCPU, false);  // what the inner one found
}

TEST(AutocastGuard, RestoresAfterAnException) {
  const ThreadState before;
  try {
    const AutocastGuard outer(at::kCPU);
    const AutocastGuard inner(at::kCPU, {.enabled = false, .policy = Policy::torch()});
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, NestedRegionsInheritDtypeCacheFlagAndPolicy) {
  const AutocastGuard outer(
      at::kCPU,
      {.dtype = at::kHalf, .cache_enabled = false, .policy = Policy::torch().fp32({"relu"})});
  const AutocastGuard inner(at::kCPU);
  EXPECT_EQ(mm_dtype(), at::kHalf);
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(add_dtype(at::kHalf), at::kHalf);
  EXPECT_EQ(ones(at::kCPU, at::kHalf).relu().scalar_type(), at::kFloat);
}

TEST(AutocastGuard, ANestedRegionMayHaveAPolicyOfItsOwn) {
  const AutocastGuard outer(at::kCPU);
  EXPECT_EQ(add_dtype(at::kBFloat16), at::kFloat);
  {
    const AutocastGuard inner(at::kCPU, {.policy = Policy::torch()});
    EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
  }
  EXPECT_EQ(add_dtype(at::kBFloat16), at::kFloat);
}

TEST(AutocastGuard, ADisabledRegionCastsNothingAndPassesThePolicyOn) {
  const AutocastGuard outer(at::kCPU, {.policy = Policy::standard().fp32({"relu"})});
  {
    const AutocastGuard disabled(at::kCPU, {.enabled = false});
    EXPECT_EQ(mm_dtype(), at::kFloat);
    EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
    const AutocastGuard enabled(at::kCPU);
    EXPECT_EQ(ones(at::kCPU, at::kBFloat16).relu().scalar_type(), at::kFloat);
  }
  EXPECT_EQ(mm_dtype(), at::kBFloat16);
}

TEST(AutocastGuard, RegionsOfTwoDevicesKeepTheirOwnPolicies) {
  const AutocastGuard cpu(at::kCPU, {.policy = Policy::torch()});
  const AutocastGuard other(at::DeviceType::MAIA, {.policy = Policy::standard()});
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::DeviceType::MAIA));
  EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
}

TEST(AutocastGuard, RegionsThatEndOutOfOrderRestoreWhatEachFound) {
  const ThreadState before;
  std::optional<AutocastGuard> first(std::in_place, at::kCPU);
  std::optional<AutocastGuard> second(std::in_place, at::kCPU,
                                      torchamp::AutocastOptions{.policy = Policy::torch()});
  first.reset();
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU)) << "what the first found";
  second.reset();
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU)) << "what the second found";
  at::autocast::set_autocast_enabled(at::kCPU, false);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  torch::jit::setGraphExecutorOptimize(true);
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, ASlotPushedInsideOutlivesTheRegion) {
  struct Info : c10::DebugInfoBase {};
  const auto kind = c10::DebugInfoKind::TEST_INFO;
  const ThreadState before;
  {
    const AutocastGuard autocast(at::kCPU);
    c10::ThreadLocalDebugInfo::_push(kind, std::make_shared<Info>());
  }
  EXPECT_NE(c10::ThreadLocalDebugInfo::get(kind), nullptr);
  EXPECT_EQ(torchamp::detail::thread_policy(), nullptr);
  c10::ThreadLocalDebugInfo::_pop(kind);
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, AnotherThreadIsNotAffected) {
  const AutocastGuard autocast(at::kCPU);
  std::thread([] {
    EXPECT_EQ(mm_dtype(), at::kFloat);
    EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
  }).join();
}

TEST(AutocastGuard, DestroyedByAnotherThreadItWarnsAndTouchesNothing) {
  std::optional<AutocastGuard> guard(std::in_place, at::kCPU);
  std::string warnings;
  std::thread([&] {
    const AutocastGuard own(at::kCPU, {.policy = Policy::torch()});
    const auto* const own_policy = torchamp::detail::thread_policy();
    const ThreadState before;
    CollectedWarnings collected;
    guard.reset();
    warnings = collected.text();
    EXPECT_EQ(ThreadState(), before);
    EXPECT_EQ(torchamp::detail::thread_policy(), own_policy);
  }).join();
  EXPECT_THAT(warnings, HasSubstr("~AutocastGuard: destroyed by another thread"));
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::decrement_nesting();
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  torch::jit::setGraphExecutorOptimize(true);
}

TEST(AutocastGuard, AGuardLikeTheLastUsesItsMemoryForARegionOfItsOwn) {
  const auto policy_of = [](const torchamp::AutocastOptions& options) {
    const AutocastGuard autocast(at::kCPU, options);
    return std::pair(torchamp::detail::thread_policy(),
                     torchamp::detail::thread_policy()->keep.region);
  };
  const auto first = policy_of({}), second = policy_of({});
  EXPECT_EQ(second.first, first.first);
  EXPECT_NE(second.second, first.second);
  {
    const AutocastGuard other(at::kCPU, {.policy = Policy::torch()});
    EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
  }
  const AutocastGuard disabled(at::kCPU, {.enabled = false});
  EXPECT_EQ(mm_dtype(), at::kFloat);
}

TEST(AutocastGuard, AGuardLikeTheLastLeavesAStateThatSomebodyHasTakenAsItWas) {
  std::optional<torchamp::AutocastState> state;
  std::uint64_t region = 0;
  {
    const AutocastGuard autocast(at::kCPU);
    state = torchamp::AutocastState::of_this_thread();
    region = torchamp::detail::thread_policy()->keep.region;
  }
  {
    const AutocastGuard next(at::kCPU);
    EXPECT_NE(torchamp::detail::thread_policy()->keep.region, region);
  }
  const torchamp::AutocastStateGuard again(*state);
  EXPECT_EQ(torchamp::detail::thread_policy()->keep.region, region);

  const at::ThreadLocalState carried;  // by LibTorch, as to autograd's threads
  state.reset();
  std::thread([&] {
    const at::ThreadLocalStateGuard taken_over(carried);
    EXPECT_EQ(torchamp::detail::thread_policy()->keep.region, region);
    const AutocastGuard nested(at::kCPU);
    EXPECT_EQ(torchamp::detail::thread_policy()->keep.region, region);
  }).join();
}

TEST(AutocastGuard, AGuardLikeTheLastHidesNothingThatOthersLookAt) {
  { const AutocastGuard last(at::kCPU); }
  const MemoryMeter meter;  // as a profiler, in a slot of the thread
  const AutocastGuard like_the_last(at::kCPU);
  const at::Tensor tensor = at::ones({16});
  EXPECT_EQ(meter.bytes(), 64);
}

TEST(AutocastGuard, ItsEndLetsGoOfWhatItsPolicysPredicatesHold) {
  auto held = std::make_shared<int>();
  const std::weak_ptr<int> watched = held;
  {
    const auto is_held = [held = std::move(held)](const torchamp::OpCall&) { return !!held; };
    const AutocastGuard autocast(
        at::kCPU, {.policy = Policy::standard().fp32({"mm"}, {.predicate = is_held})});
    EXPECT_EQ(mm_dtype(), at::kFloat);
  }
  EXPECT_TRUE(watched.expired());
}

TEST(AutocastGuard, UsersOfRawAutocastSeeNoChange) {
  { const AutocastGuard installs_overlays(at::kCPU, {.policy = Policy::standard().fp32({"mm"})}); }
  EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
  EXPECT_EQ(ones(at::kCPU, at::kBFloat16).softmax(0).scalar_type(), at::kBFloat16);
  EXPECT_EQ(mm_dtype(), at::kBFloat16);
  EXPECT_EQ(ones(at::kCPU, at::kBFloat16).prod().scalar_type(), at::kFloat)
      << "on the CPU's own list";
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

TEST(AutocastGuard, LibTorchsWarningOfReplacedKernelsIsNotSeen) {
  const CollectedWarnings warnings;
  const AutocastGuard autocast(at::kCPU, {.policy = Policy::standard().fp32({"bmm", "cat"})});
  EXPECT_EQ(warnings.text(), "");
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
  {
    const at::NoGradGuard no_grad;
    weight.mul_(2);
  }
  EXPECT_EQ(x.mm(weight)[0][0].item<float>(), 4) << "LibTorch's limit, as documented";
  torchamp::clear_weight_cache();
  EXPECT_EQ(x.mm(weight)[0][0].item<float>(), 8);
}

TEST(AutocastGuard, AForwardWithoutGradientsBeforeATrainingForwardLosesNone) {
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

TEST(AutocastGuard, TakesADeviceWhereverItTakesAType) {
  const at::Tensor x = ones(at::kCPU, at::kFloat);
  const at::Device device = x.device();
  const ThreadState before;
  {
    const AutocastGuard autocast(device);
    EXPECT_EQ(mm_dtype(), at::kBFloat16);
    const AutocastGuard dtype(device, at::kHalf);
    EXPECT_EQ(mm_dtype(), at::kHalf);
    const AutocastGuard options(device, {.dtype = at::kBFloat16});
    EXPECT_EQ(mm_dtype(), at::kBFloat16);
    const AutocastGuard braces(device, {});
    const AutocastGuard indexed({at::kCPU, 0}, {.enabled = false});
    EXPECT_EQ(mm_dtype(), at::kFloat);
    const AutocastGuard of_tensor{x.device(), at::kHalf};
    EXPECT_EQ(mm_dtype(), at::kHalf);
  }
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, ADeviceWithoutAutocastIsAnError) {
  const at::Device meta(at::kMeta);
  EXPECT_ERROR(AutocastGuard guard(meta),
               "AutocastGuard: LibTorch has no autocast for the device type 'meta'.");
  const ThreadState before;
  EXPECT_ERROR(
      AutocastGuard guard(at::kMeta),
      "AutocastGuard: LibTorch has no autocast for the device type 'meta'. Pass torch::kCPU");
  EXPECT_ERROR(
      AutocastGuard guard(static_cast<at::DeviceType>(99)),
      "AutocastGuard: LibTorch has no autocast for the device type '99'. Pass torch::kCPU");
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, ADtypeThatIsNotFloatingIsAnError) {
  const ThreadState before;
  EXPECT_ERROR(
      AutocastGuard guard(at::kCPU, at::kInt),
      "AutocastGuard: the dtype Int is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, ADtypeThatIsNotFloatingIsAnErrorInADisabledRegionToo) {
  const ThreadState before;
  for (const at::ScalarType dtype : {at::kInt, at::kBool, at::kComplexFloat}) {
    EXPECT_ERROR(AutocastGuard guard(at::kCPU, {.dtype = dtype, .enabled = false}),
                 "is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
    EXPECT_EQ(ThreadState(), before);
  }
  const AutocastGuard wide(at::kCPU, {.dtype = at::kBFloat16, .enabled = false});
  const AutocastGuard nested(at::kCPU);
  EXPECT_EQ(mm_dtype(), at::kBFloat16);
}

TEST(AutocastGuard, AnUnsupportedFloatingDtypeWarnsAndRunsDisabled) {
  const CollectedWarnings warnings;
  const AutocastGuard autocast(at::kCPU, at::kFloat);
  EXPECT_THAT(warnings.text(), HasSubstr("autocast on cpu supports fp16 and bf16, not Float"));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  const AutocastGuard another(at::kCPU, at::kDouble);
  EXPECT_THAT(warnings.text(), HasSubstr("not Double"));
}

TEST(AutocastGuard, ARegionOfABackendThatIsNotThereWarnsOfEachAndRunsDisabled) {
  for (const auto& [device, is_there] :
       {std::pair(at::kMPS, at::hasMPS()), std::pair(at::kXPU, at::hasXPU()),
        std::pair(at::kXLA, at::hasXLA()), std::pair(at::kHPU, at::hasHPU())}) {
    if (is_there) continue;
    const ThreadState before;
    {
      const CollectedWarnings warnings;
      const AutocastGuard autocast(device);
      const std::string name = c10::DeviceTypeName(device);
      EXPECT_THAT(warnings.text(), HasSubstr("AutocastGuard: there is no " + name + " device. " +
                                             name + " regions run with autocast disabled."));
      EXPECT_FALSE(at::autocast::is_autocast_enabled(device));
    }
    EXPECT_EQ(ThreadState(), before);
  }
}

/// Counts warnings as a program sees them: those that are given only once, once.
struct CountedWarnings final : c10::WarningHandler {
  int count = 0;
  void process(const c10::Warning&) override { ++count; }
};

TEST(AutocastGuard, WarnsOfAMissingBackendOnceAndNotOfADisabledRegion) {
  if (torchamp::detail::device_is_present(at::kIPU)) GTEST_SKIP() << "this LibTorch has IPUs";
  CountedWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard counted(&warnings);
  { const AutocastGuard disabled(at::kIPU, {.enabled = false}); }
  EXPECT_EQ(warnings.count, 0);
  for (int i = 0; i < 3; ++i) const AutocastGuard autocast(at::kIPU);
  EXPECT_EQ(warnings.count, 1);
}

TEST(AutocastGuard, ACudaRegionWithoutACudaDeviceWarnsAndRunsDisabled) {
  if (at::hasCUDA()) GTEST_SKIP() << "this LibTorch sees a CUDA device";
  const CollectedWarnings warnings;
  const AutocastGuard autocast(at::kCUDA);
  EXPECT_THAT(warnings.text(), HasSubstr("AutocastGuard: there is no CUDA device"));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
}

}  // namespace
