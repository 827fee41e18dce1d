// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <functional>
#include <memory>

#include "torchamp/detail/extras/graph/recorder.h"

/// Stands in for CUDA on a CPU: a recording is the work itself, done again at each replay. So what
/// happens on the host in a replay is not tested with it, but the order of things is.
class Repeater final : public torchamp::detail::GraphRecorder {
 public:
  struct Log {
    int runs = 0, records = 0, replays = 0, resets = 0;
    at::DeviceType watched = at::kMeta;  // nothing, since the CPU's kernels read
    bool refuse = false;
    std::function<void()> at_record = nullptr;
  };
  explicit Repeater(Log& log) : log_(log) {}

  c10::DeviceType device_type() const override { return log_.watched; }
  void run(const std::function<void()>& work) override {
    ++log_.runs;
    work();
  }
  void record(const std::function<void()>& work) override {
    ++log_.records;
    TORCH_CHECK(!log_.refuse, "operation not permitted");
    if (log_.at_record) log_.at_record();
    work_ = work;
  }
  void replay() override {
    ++log_.replays;
    work_();
  }
  void reset() override {
    ++log_.resets;
    work_ = nullptr;
  }
  std::unique_ptr<GraphRecorder> another() const override {
    return std::make_unique<Repeater>(log_);
  }

 private:
  Log& log_;
  std::function<void()> work_;
};

inline auto repeating(Repeater::Log& log) {
  return [&log](c10::Device) { return std::make_unique<Repeater>(log); };
}
