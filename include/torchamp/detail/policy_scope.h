// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/shared_runtime.h"
#include "torchamp/detail/thread_policy.h"

namespace torchamp::detail {

/// Puts a ThreadPolicy into the calling thread's slot, and takes it out again.
class PolicyScope {
 public:
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy)
      : before_(c10::ThreadLocalDebugInfo::current()) {
    c10::ThreadLocalDebugInfo::_push(policy_slot(),
                                     std::const_pointer_cast<ThreadPolicy>(std::move(policy)));
    ours_ = c10::ThreadLocalDebugInfo::current().get();
  }

  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

  ~PolicyScope() {
    if (c10::ThreadLocalDebugInfo::current().get() == ours_) {
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    } else {
      take_out_from_below();
    }
  }

 private:
  // Note [Slots pushed inside a scope]
  // LibTorch keeps a thread's slots as a stack. A profiler that is started inside a scope and
  // outlives it has its slot above ours; putting back what was there before us would end the
  // profiler. So what lies above is lifted off, and put back on what was below us.
  void take_out_from_below() noexcept {
    using Info = c10::ThreadLocalDebugInfo;
    using Kind = c10::DebugInfoKind;
    std::vector<std::pair<Kind, std::shared_ptr<c10::DebugInfoBase>>> above;
    try {
      bool lifted = true;
      while (lifted && Info::current() && Info::current().get() != ours_) {
        lifted = false;
        for (const Kind kind : {policy_slot(), Kind::PRODUCER_INFO, Kind::MOBILE_RUNTIME_INFO,
                                Kind::PROFILER_STATE, Kind::INFERENCE_CONTEXT,
                                Kind::PARAM_COMMS_INFO, Kind::TEST_INFO, Kind::TEST_INFO_2}) {
          if (!on_top(kind)) continue;
          above.emplace_back(kind, Info::_pop(kind));
          lifted = true;
          break;
        }
      }
      const bool found = Info::current() && Info::current().get() == ours_;
      Info::_forceCurrentDebugInfo(std::move(before_));
      // Without our slot below it, what lay above belongs to a state that has been left.
      if (!found) return;
      for (auto slot = above.rbegin(); slot != above.rend(); ++slot) {
        Info::_push(slot->first, std::move(slot->second));
      }
    } catch (const std::exception& error) {
      TORCH_WARN("~AutocastGuard: cannot restore the thread's slots: ", error.what());
    }
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
};

}  // namespace torchamp::detail
