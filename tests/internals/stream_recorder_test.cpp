// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/graph/recorder.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"

namespace {

using ::testing::ElementsAre;
using torchamp::detail::DeviceGraph;
using torchamp::detail::StreamRecorder;

/// Notes what it is asked for, and on which device.
class NotedGraph final : public DeviceGraph {
 public:
  struct Calls {
    std::vector<std::string> made;
    std::string failing;         // throws
    NotedGraph* last = nullptr;  // that was made
  };
  using DeviceGraph::attempt;

  explicit NotedGraph(Calls& calls) : calls_(calls) { calls_.last = this; }
  ~NotedGraph() override { note("end of its life"); }
  void begin() override { note("begin"); }
  void end() override { note("end"); }
  void abandon() noexcept override { note("abandon"); }
  void replay() override { note("replay"); }
  void reset() override { note("reset"); }

 private:
  void note(const std::string& call) {
    const auto device = c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDevice();
    calls_.made.push_back(call + " on " + std::to_string(device.index()));
    if (call == calls_.failing) throw std::runtime_error("no " + call);
  }
  Calls& calls_;
};

/// A recorder of device 1, where device 0 is the current one.
class Recorder : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(at::kPrivateUse1);
    recorder_.emplace(c10::Device(at::kPrivateUse1, 1),
                      [this](c10::Device) { return std::make_unique<NotedGraph>(calls_); });
  }
  void record() {
    recorder_->record([this] { calls_.made.emplace_back("work"); });
  }
  /// What has been asked for since the last time.
  std::vector<std::string> made() { return std::exchange(calls_.made, {}); }

  NotedGraph::Calls calls_;
  std::optional<StreamRecorder> recorder_;
};

TEST_F(Recorder, LetsGoOfARecordingBeforeItMakesAnother) {
  record();
  EXPECT_THAT(made(), ElementsAre("begin on 1", "work", "end on 1"));
  record();
  EXPECT_THAT(made(),
              ElementsAre("reset on 1", "end of its life on 1", "begin on 1", "work", "end on 1"));
  recorder_->reset();
  EXPECT_THAT(made(), ElementsAre("reset on 0", "end of its life on 0"));
  recorder_->reset();
  EXPECT_THAT(made(), ElementsAre()) << "there is nothing left";
}

TEST_F(Recorder, ReplaysOnItsDeviceAndLeavesTheCallersCurrent) {
  record();
  (void)made();
  recorder_->replay();
  EXPECT_THAT(made(), ElementsAre("replay on 1"));
  EXPECT_EQ(c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDevice().index(), 0);
}

TEST_F(Recorder, AbandonsAnInterruptedRecordingAtAnyPoint) {
  EXPECT_THROW(recorder_->record([] { throw std::out_of_range("mine"); }), std::out_of_range);
  EXPECT_THAT(made(), ElementsAre("begin on 1", "abandon on 1", "end of its life on 1"));
  for (const char* const failing : {"begin", "end"}) {
    calls_.failing = failing;
    EXPECT_THROW(record(), std::runtime_error);
    const std::vector<std::string> all = made();
    EXPECT_EQ(all.at(all.size() - 2), "abandon on 1");
  }
  calls_.failing.clear();
  recorder_->reset();
  EXPECT_THAT(made(), ElementsAre()) << "there is no recording";
}

TEST_F(Recorder, LeavesAGraphAloneThatCannotBeResetAtTheEnd) {
  record();
  calls_.failing = "reset";
  recorder_.reset();
  EXPECT_EQ(calls_.made.back(), "reset on 0") << "and not destroyed";
  delete calls_.last;
}

TEST(DeviceGraphs, SayWhetherAnAttemptHasFailed) {
  EXPECT_TRUE(NotedGraph::attempt([] {}));
  EXPECT_FALSE(NotedGraph::attempt([] { throw std::runtime_error("no"); }));
}

}  // namespace
