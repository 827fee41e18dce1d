// SPDX-License-Identifier: BSD-3-Clause
// What a region sets, restores and hands on: nested, ended out of order, by another thread.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "support/cpu_dtypes.h"
#include "support/memory_meter.h"
#include "support/thread_state.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/autocast_state.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace {

using cpu_dtypes::add_dtype;
using cpu_dtypes::mm_dtype;
using cpu_dtypes::ones;
using ::testing::HasSubstr;
using torchamp::AutocastGuard;
using torchamp::Policy;

// A backend that is there: LibTorch's tests use such a guard for devices without hardware.
C10_REGISTER_GUARD_IMPL(MAIA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MAIA>)

/// Leaves no part of the thread's state as it found it.
void disturb() {
  at::autocast::set_autocast_enabled(at::kCPU, !at::autocast::is_autocast_enabled(at::kCPU));
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  at::autocast::set_autocast_cache_enabled(!at::autocast::is_autocast_cache_enabled());
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
  const CollectedWarnings warnings;
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
  EXPECT_EQ(warnings.text(), "");
}

TEST(AutocastGuard, RegionsThatEndOutOfOrderLeaveNoLevelOpen) {
  std::optional<torchamp::detail::AutocastRegion> outer, inner;
  outer.emplace(at::kCPU, torchamp::AutocastOptions{});
  inner.emplace(at::kCPU, torchamp::AutocastOptions{});
  const CollectedWarnings warnings;
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
  if (!at::autocast::is_autocast_available(at::DeviceType::MAIA)) {
    GTEST_SKIP() << "this LibTorch has no autocast for the other device";
  }
  const AutocastGuard cpu(at::kCPU, {.policy = Policy::torch()});
  const AutocastGuard other(at::DeviceType::MAIA, {.policy = Policy::standard()});
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::DeviceType::MAIA));
  EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
}

TEST(AutocastGuard, RegionsThatEndOutOfOrderRestoreWhatEachFoundWithAWarning) {
  const ThreadState before;
  const CollectedWarnings warnings;
  std::optional<AutocastGuard> first(std::in_place, at::kCPU);
  std::optional<AutocastGuard> second(std::in_place, at::kCPU,
                                      torchamp::AutocastOptions{.policy = Policy::torch()});
  first.reset();
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU)) << "what the first found";
  const std::string told = warnings.text();
  EXPECT_THAT(told, HasSubstr("~AutocastGuard: a guard that was made later on this thread"));
  second.reset();
  EXPECT_EQ(warnings.text(), told);
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

TEST(AutocastGuard, SlotsPushedInsideKeepTheirOrderWhenTheyOutliveTheRegion) {
  struct Info : c10::DebugInfoBase {};
  const ThreadState before;
  const auto lower = std::make_shared<Info>(), upper = std::make_shared<Info>();
  {
    const AutocastGuard autocast(at::kCPU);
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::TEST_INFO, lower);
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::TEST_INFO_2, upper);
  }
  EXPECT_EQ(torchamp::detail::thread_policy(), nullptr);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO_2), upper);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO), lower);
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

/// What is kept of weights while it lives, as far as regions go.
class Regions final : public torchamp::detail::KeptWeights {
 public:
  Regions() { torchamp::detail::shared_runtime().kept_weights = this; }
  ~Regions() { torchamp::detail::shared_runtime().kept_weights = nullptr; }

  std::uint64_t begin_region() override {
    open_.insert(++last_);
    return last_;
  }
  void end_region(std::uint64_t region) override { EXPECT_EQ(open_.erase(region), 1U); }
  void changed(at::TensorList) override {}
  void all_changed() override {}
  void clear() override {}

  std::uint64_t begun() const { return last_; }
  std::size_t open() const { return open_.size(); }

 private:
  std::uint64_t last_ = 0;
  std::set<std::uint64_t> open_;
};

TEST(AutocastGuard, TheOutermostTellsWhoKeepsThingsOfWeightsOfItsBeginAndEnd) {
  const Regions regions;
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const AutocastGuard outermost(at::kCPU);
    const AutocastGuard nested(at::kCPU, {.policy = Policy::torch()});
    EXPECT_EQ(regions.begun(), i);
    EXPECT_EQ(regions.open(), 1U);
    EXPECT_EQ(torchamp::detail::thread_policy()->keep.region, i);
  }
  EXPECT_EQ(regions.open(), 0U);
  EXPECT_ANY_THROW(const AutocastGuard refused(at::kCPU, at::kInt));
  EXPECT_EQ(regions.begun(), 3U);
}

TEST(AutocastGuard, AGuardLikeTheLastUsesItsMemoryForARegionOfItsOwn) {
  const Regions regions;
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
  const Regions regions;
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
  { const AutocastGuard registers_kernels(at::kCPU, {.policy = Policy::standard().fp32({"mm"})}); }
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

}  // namespace
