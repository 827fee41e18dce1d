// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/autocast_state.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "support/expect_error.h"
#include "support/thread_state.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"

namespace {

using ::testing::HasSubstr;
using torchamp::AutocastGuard;
using torchamp::AutocastState;
using torchamp::AutocastStateGuard;
using torchamp::Policy;

at::ScalarType relu_dtype() {
  return at::ones({2}, at::kHalf).relu().scalar_type();
}
at::ScalarType dtype_of_mm() {
  return at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type();
}

TEST(AutocastState, CarriesSwitchDtypeCacheFlagAndPolicyToAnotherThread) {
  const AutocastGuard autocast(
      at::kCPU,
      {.dtype = at::kHalf, .cache_enabled = false, .policy = Policy::standard().fp32({"relu"})});
  const AutocastState state = AutocastState::of_this_thread();
  std::thread([&] {
    const ThreadState before;
    {
      const AutocastStateGuard same(state);
      EXPECT_EQ(AutocastState::of_this_thread(), state);
      EXPECT_EQ(dtype_of_mm(), at::kHalf);
      EXPECT_EQ(relu_dtype(), at::kFloat);
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
      const AutocastGuard inherits(at::kCPU);
      EXPECT_EQ(relu_dtype(), at::kFloat);
    }
    EXPECT_EQ(ThreadState(), before);
    EXPECT_EQ(dtype_of_mm(), at::kFloat);
  }).join();
}

TEST(AutocastStateGuard, DestroyedByAnotherThreadItWarnsAndTouchesNothing) {
  AutocastState inside = AutocastState::of_this_thread();
  {
    const AutocastGuard autocast(at::kCPU, {.policy = Policy::standard().fp32({"relu"})});
    inside = AutocastState::of_this_thread();
  }
  std::optional<AutocastStateGuard> guard;
  std::thread([&] { guard.emplace(inside); }).join();
  const AutocastGuard own(at::kCPU, at::kHalf);
  const AutocastState before = AutocastState::of_this_thread();
  const CollectedWarnings warnings;
  guard.reset();
  EXPECT_THAT(warnings.text(), HasSubstr("~AutocastStateGuard: destroyed by another thread"));
  EXPECT_EQ(AutocastState::of_this_thread(), before);
}

TEST(AutocastState, OfAThreadWithoutGuardsEndsARegion) {
  const AutocastState outside = AutocastState::of_this_thread();
  const AutocastGuard autocast(at::kCPU, {.policy = Policy::standard().fp32({"relu"})});
  const ThreadState inside;
  {
    const AutocastStateGuard as_outside(outside);
    EXPECT_EQ(dtype_of_mm(), at::kFloat);
    EXPECT_EQ(relu_dtype(), at::kHalf);
    at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
    at::autocast::set_autocast_cache_enabled(false);
  }
  EXPECT_EQ(ThreadState(), inside);
  EXPECT_EQ(relu_dtype(), at::kFloat);
}

TEST(AutocastState, TellsItsParts) {
  const AutocastGuard autocast(at::kCPU, {.dtype = at::kHalf, .cache_enabled = false});
  const AutocastState state = AutocastState::of_this_thread();
  EXPECT_TRUE(state.is_enabled(at::kCPU));
  EXPECT_FALSE(state.is_enabled(at::kCUDA));
  EXPECT_EQ(state.dtype(at::kCPU), at::kHalf);
  EXPECT_TRUE(state.is_enabled(at::Device(at::kCPU, 0)));
  EXPECT_EQ(state.dtype(at::ones({1}).device()), at::kHalf);
  EXPECT_FALSE(state.is_cache_enabled());
  EXPECT_ERROR((void)state.dtype(at::kMeta), "AutocastState: LibTorch has no autocast for");
}

TEST(AutocastStateGuard, OfTheOther16BitDtypeCastsWeightsToItsOwn) {
  std::optional<AutocastState> half;
  {
    const AutocastGuard autocast(at::kCPU, at::kHalf);
    half = AutocastState::of_this_thread();
  }
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(), x = at::ones({2, 2});
  const AutocastGuard outer(at::kCPU, at::kBFloat16);
  EXPECT_EQ(x.mm(weight).scalar_type(), at::kBFloat16);
  {
    const AutocastStateGuard inner(*half);
    EXPECT_EQ(at::autocast::cached_cast(at::kHalf, weight, at::kCPU).scalar_type(), at::kHalf);
    EXPECT_EQ(x.mm(weight).scalar_type(), at::kHalf);
  }
  EXPECT_EQ(x.mm(weight).scalar_type(), at::kBFloat16);
}

TEST(AutocastStateGuard, ThatTakesEverythingOffGivesTheStateItWasGiven) {
  const AutocastState none = AutocastState::of_this_thread();
  const AutocastGuard autocast(at::kCPU);
  const AutocastStateGuard off(none);
  EXPECT_EQ(AutocastState::of_this_thread(), none);
}

TEST(AutocastState, MovedFromItIsStillAState) {
  AutocastState state = AutocastState::of_this_thread();
  const AutocastState moved = std::move(state);
  EXPECT_FALSE(state.is_enabled(at::kCPU));  // NOLINT(bugprone-use-after-move)
  const AutocastStateGuard guard(state);
  EXPECT_EQ(AutocastState::of_this_thread(), moved);
}

TEST(AutocastState, OutlivesTheGuardThatMadeIt) {
  std::optional<AutocastState> state;
  {
    const AutocastGuard autocast(at::kCPU, {.policy = Policy::standard().fp32({"relu"})});
    state = AutocastState::of_this_thread();
  }
  const AutocastStateGuard again(*state);
  EXPECT_EQ(relu_dtype(), at::kFloat);
}

}  // namespace
