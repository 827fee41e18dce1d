// SPDX-License-Identifier: BSD-3-Clause
// Why casts were made that need not have been.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <thread>

#include "support/recorder_on.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/cast_recorder.h"

namespace {

using recorder_on::Calls;
using recorder_on::Recorder;
using recorder_on::row_of;
using torchamp::AutocastGuard;
using torchamp::CastRecorder;
using torchamp::OpCall;
using torchamp::Policy;

// Casts that undo each other

TEST_P(Recorder, DetectsACastOfACastsResultBack) {
  const auto x = wide({4});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  const auto y = x.to(low());
  EXPECT_EQ(recorder.report().total().undone, 0);
  (void)y.view({2, 2}).exp();
  EXPECT_EQ(row_of(recorder, "exp").undone, 1);
}

TEST_P(Recorder, DetectsACastBackAfterAnOpInFp32) {
  const auto x = narrow({2, 2});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  auto y = x.exp();  // softmax's own kernel casts on accelerators
  EXPECT_EQ(row_of(recorder, "exp").casts, 1);
  y = at::dropout(y, 0.5, /*train=*/true).t() * 0.5;
  (void)y.mm(x);
  EXPECT_EQ(row_of(recorder, "mm").casts, 1);
  EXPECT_EQ(row_of(recorder, "mm").undone, 1);
  EXPECT_EQ(recorder.report().total().undone, 1);
}

TEST_P(Recorder, TakesNoOtherCastsForUndone) {
  const auto x = wide({2, 2});
  const auto y = narrow({2, 2});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  (void)x.mm(x).exp();        // to 16 bits for mm, and its result to fp32
  (void)y.exp().exp().mm(y);  // the second exp wants fp32 itself
  (void)y.softmax(-1).exp();  // stays in fp32
  EXPECT_EQ(recorder.report().total().undone, 0) << recorder.report();
}

// Ops in fp32 because of an input

TEST_P(Recorder, DetectsOpsInFp32BecauseOfAnInput) {
  const auto x = narrow({2, 2});
  const auto y = wide({2, 2});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  (void)(x * y);
  (void)(x * y.sum());  // a tensor without dimensions decides nothing
  (void)at::cat({x, y});
  (void)at::cat({x, x});
  (void)at::mse_loss(x, y);  // its rule is fp32
  (void)(x + y);             // and so is the input of additions
  (void)at::ones_like(y).mul_(x);
  (void)x.mm(y);
  EXPECT_EQ(row_of(recorder, "mul.Tensor").calls, (Calls{{at::kFloat, 1}, {low(), 1}}));
  EXPECT_EQ(row_of(recorder, "mul.Tensor").fp32_by_input, 1);
  EXPECT_EQ(row_of(recorder, "cat").calls, (Calls{{at::kFloat, 1}, {low(), 1}}));
  EXPECT_EQ(row_of(recorder, "cat").fp32_by_input, 1);
  EXPECT_EQ(recorder.report().total().fp32_by_input, 2) << recorder.report();
}

TEST_P(Recorder, AsksThePolicyWhetherARuleWantedFp32) {
  const auto x = narrow({2});
  const auto y = wide({2});
  const auto count = [&](const Policy& policy, auto call) {
    const CastRecorder recorder;
    const AutocastGuard autocast(device(), {.policy = policy});
    (void)call();
    return recorder.report().total().fp32_by_input;
  };
  const auto add = [&] { return x + y; };
  const auto mul = [&] { return x * y; };
  EXPECT_EQ(count(Policy::standard(), add), 0);
  EXPECT_EQ(count(Policy::torch(), add), 1);
  EXPECT_EQ(count(Policy::standard().promote({"mul"}), mul), 1);
  EXPECT_EQ(count(Policy::standard().fp32({"mul"}), mul), 0);
  const auto when_size = [](std::int64_t size) {
    return torchamp::When{.predicate = [size](const OpCall& call) {
      return (call.argument("self").toTensor() + 0).numel() == size;
    }};
  };
  EXPECT_EQ(count(Policy::standard().fp32({"mul"}, when_size(2)), mul), 0);
  EXPECT_EQ(count(Policy::standard().fp32({"mul"}, when_size(3)), mul), 1);
}

TEST_P(Recorder, LetsAPredicateBeCalledOnceForEachCall) {
  const auto x = narrow({2});
  const auto y = wide({2});
  int calls = 0;
  const torchamp::When counted{.predicate = [&](const OpCall&) { return ++calls % 2 == 1; }};
  const CastRecorder recorder, another;
  const AutocastGuard autocast(device(), {.policy = Policy::torch().promote({"mul"}, counted)});
  (void)(x * y);  // promoted by a rule
  EXPECT_EQ(calls, 1);
  (void)(x * y);  // by type promotion
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(row_of(recorder, "mul.Tensor").fp32_by_input, 2) << recorder.report();
  EXPECT_EQ(row_of(another, "mul.Tensor").fp32_by_input, 2);
}

TEST_P(Recorder, KeepsOutOfAPredicatesWay) {
  const auto x = narrow({2});
  const auto y = wide({2});
  const CastRecorder recorder;
  const torchamp::When when{.predicate = [&](const OpCall& call) {
    EXPECT_TRUE(recorder.report().rows().empty());  // must not wait for itself
    std::thread(at::wrapPropagateTLSState([&] { (void)recorder.report(); })).join();
    return (call.argument("self").toTensor() + 0).numel() == 2;
  }};
  const AutocastGuard autocast(device(), {.policy = Policy::torch().fp32({"mul"}, when)});
  (void)(x * y);
  const auto report = recorder.report();
  ASSERT_EQ(report.rows().size(), 1u) << "the predicate's own ops are not the program's" << report;
  EXPECT_EQ(row_of(report, "mul.Tensor").casts, 1) << report;
  EXPECT_EQ(row_of(report, "mul.Tensor").fp32_by_input, 0) << report;
}

TEST_P(Recorder, DistinguishesAChoiceOfTheInnerOpFromTheOuterOnes) {
  const auto x = narrow({2, 2});
  const auto y = wide({2, 2});
  const torchamp::When always{.predicate = [](const OpCall&) { return true; }};
  const CastRecorder recorder;
  const AutocastGuard autocast(
      device(), {.policy = Policy::torch().unchanged({"mul"}, always).fp32({"addcmul"}, always)});
  RECORD_USER_SCOPE("scope");
  (void)at::addcmul(x, x, y);
  (void)(x * y);
  const auto report = recorder.report();
  EXPECT_EQ(row_of(report, "addcmul", "scope").fp32_by_input, 0) << report;
  EXPECT_EQ(row_of(report, "mul.Tensor", "scope").fp32_by_input, 1) << report;
}

}  // namespace
