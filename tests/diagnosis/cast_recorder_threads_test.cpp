// SPDX-License-Identifier: BSD-3-Clause
// Which ops a recorder counts: on which threads, from when, until when.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/recorder_on.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/cast_recorder.h"

namespace {

using recorder_on::Calls;
using recorder_on::Recorder;
using recorder_on::row_of;
using torchamp::AutocastGuard;
using torchamp::CastRecorder;

TEST_P(Recorder, FollowsLibTorchsThreadStateAndNoOtherThread) {
  const auto x = wide({2});
  const CastRecorder recorder;
  std::thread(at::wrapPropagateTLSState([&] { (void)x.relu(); })).join();
  std::thread([&] { (void)x.exp(); }).join();
  EXPECT_EQ(row_of(recorder, "relu").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(recorder.report().rows().size(), 1u);
}

TEST_P(Recorder, CountsOnSeveralThreadsAtOnce) {
  const auto x = narrow({8});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back(at::wrapPropagateTLSState([&] {
      for (int step = 0; step < 50; ++step) (void)x.exp();
    }));
  }
  for (int step = 0; step < 50; ++step) (void)recorder.report();
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(row_of(recorder, "exp").calls, (Calls{{at::kFloat, 200}}));
  EXPECT_EQ(row_of(recorder, "exp").casts, 200);
}

TEST_P(Recorder, RecordsFromItsConstructionToItsDestruction) {
  const auto x = wide({2});
  ASSERT_FALSE(at::hasCallbacks());
  {
    const CastRecorder outer;
    (void)x.relu();
    {
      const CastRecorder inner;
      (void)x.relu();
      EXPECT_EQ(row_of(inner, "relu").calls, (Calls{{at::kFloat, 1}}));
    }
    (void)x.relu();
    EXPECT_EQ(row_of(outer, "relu").calls, (Calls{{at::kFloat, 3}}));
  }
  EXPECT_FALSE(at::hasCallbacks());
  std::optional<CastRecorder> ended(std::in_place);
  RECORD_USER_SCOPE("outlives the recorder");
  ended.reset();
}

TEST(RecorderErrors, RefusesMoreThan32AtOnce) {
  std::vector<std::unique_ptr<std::optional<CastRecorder>>> recorders;
  for (int i = 0; i < 32; ++i) {
    recorders.push_back(std::make_unique<std::optional<CastRecorder>>(std::in_place));
  }
  EXPECT_ERROR((void)CastRecorder(), "CastRecorder: 32 are recording at once already.");
  recorders.pop_back();
  EXPECT_NO_THROW((void)CastRecorder());
  recorders.clear();
  EXPECT_FALSE(at::hasCallbacks());
}

/// How many calls a recorder has counted.
int64_t calls(const CastRecorder& recorder) {
  int64_t sum = 0;
  for (const auto& [dtype, count] : recorder.report().total().calls) sum += count;
  return sum;
}

TEST(RecorderErrors, ARecorderDestroyedOnAnotherThreadFeedsNoLaterOne) {
  const CollectedWarnings warnings;
  const auto x = at::ones({2});
  std::thread([&] {
    std::optional<CastRecorder> first(std::in_place), later;
    std::thread([&] { first.reset(); }).join();
    std::thread elsewhere([&] {
      later.emplace();
      std::thread([&] { (void)x.relu(); }).join();
      (void)x.relu();
    });
    elsewhere.join();
    (void)x.relu();  // on the first one's thread
    EXPECT_EQ(calls(*later), 1);
    const CastRecorder own;  // with the callback that the first one has left behind, or without
    (void)x.relu();
    EXPECT_EQ(calls(own), 1);
    EXPECT_EQ(calls(*later), 1);
  }).join();
}

TEST(RecorderErrors, AStateFromUnderARecorderThatHasEndedFeedsNoLaterOne) {
  const auto x = at::ones({2});
  std::optional<CastRecorder> first(std::in_place);
  const at::ThreadLocalState before;
  first.reset();
  const CastRecorder later;
  {
    const at::ThreadLocalStateGuard guard(before);
    (void)x.relu();
    const CastRecorder within;
    (void)x.relu();
    EXPECT_EQ(calls(within), 1);
  }
  EXPECT_EQ(calls(later), 0);
  (void)x.relu();
  EXPECT_EQ(calls(later), 1);
}

// As the work of a collective is recorded.
TEST(RecorderErrors, ACallThatOutlivesItsCallerAndEndsOnAnotherThreadIsNoCaller) {
  static std::shared_ptr<at::RecordFunction> work;
  torch::Library library(torch::Library::DEF, "recorder_test", std::nullopt, __FILE__, __LINE__);
  library.def("begin_work(Tensor x) -> Tensor", [](const at::Tensor& x) {
    work = std::make_shared<at::RecordFunction>(at::RecordScope::FUNCTION);
    work->_setAsync();
    work->before("gloo:all_reduce");
    return x.clone();
  });
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("recorder_test::begin_work", "");
  const auto x = at::ones({2});
  const CastRecorder recorder;
  (void)op.typed<at::Tensor(const at::Tensor&)>().call(x);
  (void)x.relu();
  std::thread(at::wrapPropagateTLSState([] { work.reset(); })).join();
  (void)x.exp();
  EXPECT_EQ(row_of(recorder, "relu").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(row_of(recorder, "exp").calls, (Calls{{at::kFloat, 1}}));
}

TEST(RecorderErrors, WarnsOfDestructionOnAnotherThread) {
  const CollectedWarnings warnings;
  std::optional<CastRecorder> recorder;
  std::thread([&] { recorder.emplace(); }).join();
  recorder.reset();
  EXPECT_THAT(warnings.text(), ::testing::HasSubstr("~CastRecorder: destroyed by another thread"));
}

}  // namespace
