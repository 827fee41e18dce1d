// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

/// Bytes of tensors that the calling thread, and backward passes that it starts, allocate while
/// this lives: all at once now, and at most.
class MemoryMeter {
 public:
  MemoryMeter() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  std::int64_t bytes() const { return counter_->now; }
  std::int64_t peak_bytes() const { return counter_->peak; }

 private:
  struct Counter final : c10::MemoryReportingInfoBase {
    std::atomic<std::int64_t> now = 0, peak = 0;
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t,
                           c10::Device) override {
      now += size;
      peak = std::max(peak.load(), now.load());
    }
    bool memoryProfilingEnabled() const override { return true; }
  };

  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_;
};
