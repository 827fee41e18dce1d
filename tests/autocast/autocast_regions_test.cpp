// SPDX-License-Identifier: BSD-3-Clause
// What a region sets, restores and hands on: nested, ended out of order, by another thread.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "support/cpu_dtypes.h"
#include "support/memory_meter.h"
#include "support/thread_state.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"

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

TEST(AutocastGuard, ANestedRegionMayHaveItsOwnPolicy) {
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

TEST(AutocastGuard, RestoresTheStateBeforeAWarningThatThrows) {
  const ThrownWarnings throws;
  const ThreadState before;
  std::optional<AutocastGuard> first(std::in_place, at::kCPU, at::kHalf);
  std::optional<AutocastGuard> second(std::in_place, at::kCPU,
                                      torchamp::AutocastOptions{.policy = Policy::torch()});
  first.reset();  // out of order, so it warns
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
  second.reset();
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf) << "what the second found";
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  torch::jit::setGraphExecutorOptimize(true);
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, EndsOnAnotherThreadWithAWarningThatThrows) {
  const ThreadState before;
  std::optional<AutocastGuard> guard;
  std::thread([&] { guard.emplace(at::kCPU); }).join();
  const ThrownWarnings throws;
  guard.reset();
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, AnotherThreadIsNotAffected) {
  const AutocastGuard autocast(at::kCPU);
  std::thread([] {
    EXPECT_EQ(mm_dtype(), at::kFloat);
    EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
  }).join();
}

TEST(AutocastGuard, AGuardLikeTheLastHidesNothingThatOthersLookAt) {
  { const AutocastGuard last(at::kCPU); }
  const MemoryMeter meter;  // as a profiler, in a slot of the thread
  const AutocastGuard like_the_last(at::kCPU);
  const at::Tensor tensor = at::ones({16});
  EXPECT_EQ(meter.bytes(), 64);
}

TEST(AutocastGuard, ASavedStateKeepsItsPolicyWhileAGuardLikeItsOwnBeginsAndEnds) {
  std::optional<at::ThreadLocalState> saved;
  {
    const AutocastGuard autocast(at::kCPU);
    saved.emplace();
  }
  const auto dtype_in_saved = [&saved] {
    at::ScalarType dtype = at::kByte;
    std::thread([&] {
      const at::ThreadLocalStateGuard as_saved(*saved);
      dtype = add_dtype(at::kBFloat16);
    }).join();
    return dtype;
  };
  {
    const AutocastGuard like_the_last(at::kCPU);
    EXPECT_EQ(dtype_in_saved(), at::kFloat);
    EXPECT_EQ(add_dtype(at::kBFloat16), at::kFloat);
  }
  EXPECT_EQ(dtype_in_saved(), at::kFloat);
  EXPECT_EQ(add_dtype(at::kBFloat16), at::kBFloat16);
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
