// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <thread>
#include <utility>

#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/thread_policy.h"

namespace torchamp::detail {

/// Puts a ThreadPolicy into the calling thread's slot, and takes it out again.
class PolicyScope {
 public:
  /// Null: the slot stays as it is.
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy) {
    if (!policy) return;
    before_ = c10::ThreadLocalDebugInfo::current();
    c10::ThreadLocalDebugInfo::_push(policy_slot(),
                                     std::const_pointer_cast<ThreadPolicy>(std::move(policy)));
    ours_ = c10::ThreadLocalDebugInfo::current().get();
  }

  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

  ~PolicyScope() { end(); }

  /// For the destructor of a guard, `guard` ("~AutocastGuard"): ends the scope. False, after a
  /// warning, on another thread than the one that made it, which must leave all state as it is.
  bool end_of(const char* guard) {
    if (!is_on_its_thread()) {
      TORCH_WARN(guard,
                 ": destroyed by another thread than the one that made it. Its state was not "
                 "restored there. Keep a guard in the scope that it covers.");
      return false;
    }
    end();
    return true;
  }

 private:
  bool is_on_its_thread() const { return thread_ == std::this_thread::get_id(); }

  void end() noexcept {
    if (ours_ == nullptr || !is_on_its_thread()) return;
    if (c10::ThreadLocalDebugInfo::current().get() == ours_) {
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    } else {
      take_out_from_below();
    }
    ours_ = nullptr;
  }

  // Note [Slots pushed inside a scope]
  // LibTorch keeps a thread's slots as a stack. A profiler that is started inside a scope and
  // outlives it has its slot above ours; putting back what was there before us would end the
  // profiler. So what lies above is lifted off, and put back on what was below us.
  void take_out_from_below() noexcept {
    try {
      take_out();
    } catch (const std::exception& error) {
      TORCH_WARN("~AutocastGuard: cannot restore the thread's slots: ", error.what());
    }
  }

  // Returns whether our slot was there. Without it, what lay above belongs to a state that has been
  // left, and is dropped.
  bool take_out() {
    using Info = c10::ThreadLocalDebugInfo;
    using Kind = c10::DebugInfoKind;
    const bool at_ours = Info::current().get() == ours_;
    if (Info::current() && !at_ours) {
      for (const Kind kind :
           {policy_slot(), Kind::PRODUCER_INFO, Kind::MOBILE_RUNTIME_INFO, Kind::PROFILER_STATE,
            Kind::INFERENCE_CONTEXT, Kind::PARAM_COMMS_INFO, Kind::TEST_INFO, Kind::TEST_INFO_2}) {
        if (!on_top(kind)) continue;
        auto above = Info::_pop(kind);
        const bool found = take_out();
        if (found) Info::_push(kind, std::move(above));
        return found;
      }
    }
    Info::_forceCurrentDebugInfo(std::move(before_));
    return at_ours;
  }

  static bool on_top(c10::DebugInfoKind kind) {
    try {
      (void)c10::ThreadLocalDebugInfo::_peek(kind);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }

  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  const c10::ThreadLocalDebugInfo* ours_ = nullptr;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace torchamp::detail
