// SPDX-License-Identifier: BSD-3-Clause
// The state that a region restores, and the reports of its begin and end.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "support/cpu_dtypes.h"
#include "support/thread_state.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/autocast_state.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace {

namespace detail = torchamp::detail;
using cpu_dtypes::add_dtype;
using cpu_dtypes::mm_dtype;
using ::testing::HasSubstr;
using torchamp::AutocastGuard;
using torchamp::Policy;

TEST(AutocastGuard, RegionsThatEndOutOfOrderLeaveNoLevelOpen) {
  std::optional<detail::AutocastRegion> outer, inner;
  outer.emplace(at::kCPU, torchamp::AutocastOptions{});
  inner.emplace(at::kCPU, torchamp::AutocastOptions{});
  const CollectedWarnings warnings;
  outer.reset();
  inner.reset();
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  at::autocast::decrement_nesting();
  at::autocast::set_autocast_enabled(at::kCPU, false);  // what the inner one found
}

/// A rule whose regions end with a warning.
struct UnusedRule : detail::OpRule {
  struct Usage : detail::OpRuleUsage {
    void passed_by(const c10::OperatorName&) override {}
    void warn_if_unused() const override { TORCH_WARN("unused"); }
  };
  void prepare(const char*, const detail::PolicyData&, at::DeviceType,
               at::ScalarType) const override {}
  bool run(const c10::OperatorHandle&, at::DeviceType, torch::jit::Stack&,
           detail::OpRuleUsage*) const override {
    return false;
  }
  std::string why_not_op(std::string_view) const override { return {}; }
  std::string text() const override { return "unused"; }
  std::shared_ptr<detail::OpRuleUsage> make_usage(
      const std::shared_ptr<detail::OpRuleUsage>&) const override {
    return std::make_shared<Usage>();
  }
};

TEST(AutocastGuard, TheWarningOfAnUnusedRuleMayThrow) {
  const UnusedRule rule;
  detail::ThreadPolicy policy;
  detail::RegionListeners listeners;
  listeners.begin(policy, &rule);
  {
    const CollectedWarnings warnings;
    listeners.end_op_rule();
    EXPECT_THAT(warnings.text(), HasSubstr("unused"));
  }
  const ThrownWarnings throws;
  listeners.end_op_rule();
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
  EXPECT_EQ(detail::thread_policy(), nullptr);
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
  EXPECT_EQ(detail::thread_policy(), nullptr);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO_2), upper);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO), lower);
  EXPECT_EQ(ThreadState(), before);
}

/// The program restores the state from before the guard, which frees the guard's node, and pushes a
/// slot, to which LibTorch gives the same memory.
TEST(AutocastGuard, ASlotInTheMemoryOfARestoredStateIsNotKeptForTheNextGuard) {
  struct Info : c10::DebugInfoBase {};
  const auto kind = c10::DebugInfoKind::TEST_INFO;
  const ThreadState before;
  {
    const AutocastGuard autocast(at::kCPU);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
    c10::ThreadLocalDebugInfo::_push(kind, std::make_shared<Info>());
  }
  EXPECT_EQ(ThreadState(), before);
  {
    const AutocastGuard autocast(at::kCPU);
    EXPECT_NE(detail::thread_policy(), nullptr);
    EXPECT_EQ(c10::ThreadLocalDebugInfo::get(kind), nullptr);
  }
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, DestroyedByAnotherThreadItWarnsAndTouchesNothing) {
  std::optional<AutocastGuard> guard(std::in_place, at::kCPU);
  std::string warnings;
  std::thread([&] {
    const AutocastGuard own(at::kCPU, {.policy = Policy::torch()});
    const auto* const own_policy = detail::thread_policy();
    const ThreadState before;
    CollectedWarnings collected;
    guard.reset();
    warnings = collected.text();
    EXPECT_EQ(ThreadState(), before);
    EXPECT_EQ(detail::thread_policy(), own_policy);
  }).join();
  EXPECT_THAT(warnings, HasSubstr("~AutocastGuard: destroyed by another thread"));
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::decrement_nesting();
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  torch::jit::setGraphExecutorOptimize(true);
}

/// What is kept of weights while it lives, as far as regions go.
class Regions final : public detail::KeptWeights {
 public:
  Regions() { detail::shared_runtime().kept_weights = this; }
  ~Regions() { detail::shared_runtime().kept_weights = nullptr; }

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

TEST(AutocastGuard, TheOutermostReportsItsBeginAndEndToCachesOfWeights) {
  const Regions regions;
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const AutocastGuard outermost(at::kCPU);
    const AutocastGuard nested(at::kCPU, {.policy = Policy::torch()});
    EXPECT_EQ(regions.begun(), i);
    EXPECT_EQ(regions.open(), 1U);
    EXPECT_EQ(detail::thread_policy()->keep.region, i);
  }
  EXPECT_EQ(regions.open(), 0U);
  EXPECT_ANY_THROW(const AutocastGuard refused(at::kCPU, at::kInt));
  EXPECT_EQ(regions.begun(), 3U);
}

TEST(AutocastGuard, DestroyedByAnotherThreadItStillReportsItsEnd) {
  const Regions regions;
  std::optional<AutocastGuard> guard;
  std::thread([&] { guard.emplace(at::kCPU); }).join();
  EXPECT_EQ(regions.open(), 1U);
  const CollectedWarnings warnings;
  guard.reset();
  EXPECT_EQ(regions.open(), 0U);
}

TEST(AutocastGuard, AGuardLikeTheLastUsesItsMemoryForARegionOfItsOwn) {
  const Regions regions;
  const auto policy_of = [](const torchamp::AutocastOptions& options) {
    const AutocastGuard autocast(at::kCPU, options);
    return std::pair(detail::thread_policy(), detail::thread_policy()->keep.region);
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
    region = detail::thread_policy()->keep.region;
  }
  {
    const AutocastGuard next(at::kCPU);
    EXPECT_NE(detail::thread_policy()->keep.region, region);
  }
  const torchamp::AutocastStateGuard again(*state);
  EXPECT_EQ(detail::thread_policy()->keep.region, region);

  const at::ThreadLocalState carried;  // by LibTorch, as to autograd's threads
  state.reset();
  std::thread([&] {
    const at::ThreadLocalStateGuard taken_over(carried);
    EXPECT_EQ(detail::thread_policy()->keep.region, region);
    const AutocastGuard nested(at::kCPU);
    EXPECT_EQ(detail::thread_policy()->keep.region, region);
  }).join();
}

}  // namespace
