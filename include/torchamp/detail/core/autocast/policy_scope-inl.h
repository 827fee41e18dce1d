// SPDX-License-Identifier: BSD-3-Clause
// How a policy is put into a thread's slot, and how it is removed.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/autocast/policy_scope.h"
#include "torchamp/detail/core/autocast/script_switch.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY PolicyScope::PolicyScope(std::shared_ptr<const ThreadPolicy> policy) {
  if (policy == nullptr) return;
  policy = for_this_backward_pass(std::move(policy));
  before_ = c10::ThreadLocalDebugInfo::current();
  const ThreadPolicy* const outer = thread_policy();
  c10::ThreadLocalDebugInfo::_push(policy_slot(), std::const_pointer_cast<ThreadPolicy>(policy));
  ours_ = c10::ThreadLocalDebugInfo::current();
  scripts_outside_ = ScriptSwitch::begin_scope(outer, policy.get());
}

TORCHAMP_BODY PolicyScope::~PolicyScope() {
  if (ours_ != nullptr && is_on_its_thread()) end();
}

TORCHAMP_BODY bool PolicyScope::end_of(const char* guard) {
  if (!is_on_its_thread()) {
    warn_in_destructor({guard,
                        ": destroyed by another thread than the thread that made it, whose state "
                        "was not restored. Make the guard a local variable."});
    return false;
  }
  if (ours_ != nullptr) end();
  return true;
}

TORCHAMP_BODY void PolicyScope::end() noexcept {
  std::string failure;
  if (c10::ThreadLocalDebugInfo::current() == ours_) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
  } else {
    try {
      end_below_others();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  ours_ = nullptr;
  ScriptSwitch::end_scope(thread_policy(), scripts_outside_);
  if (failure.empty()) return;
  warn_in_destructor({"~AutocastGuard: cannot restore the thread's slots: ", failure});
}

/// One slot of a thread.
struct ThreadSlot {
  c10::DebugInfoKind kind;
  std::shared_ptr<c10::DebugInfoBase> info;
};

/// Removes the calling thread's uppermost slot. LibTorch does not report the slot's kind, and
/// _pop() of another kind throws before it changes anything: so all known kinds are tried. If the
/// kind is unknown, the slot stays, and the result is empty.
inline std::optional<ThreadSlot> pop_slot() {
  using Kind = c10::DebugInfoKind;
  for (const Kind kind :
       {policy_slot(), Kind::PRODUCER_INFO, Kind::MOBILE_RUNTIME_INFO, Kind::PROFILER_STATE,
        Kind::INFERENCE_CONTEXT, Kind::PARAM_COMMS_INFO, Kind::TEST_INFO, Kind::TEST_INFO_2}) {
    try {
      return ThreadSlot{kind, c10::ThreadLocalDebugInfo::_pop(kind)};
    } catch (const c10::Error&) {
      continue;
    }
  }
  return std::nullopt;
}

// Note [Slots pushed inside a scope]
// If a profiler starts inside a scope and outlives it, its slot is above ours. Its node refers to
// our node. So it is removed, and a new node with the same slot is pushed on the node below ours.
// If our node is missing, or is below a slot of an unknown kind, the slots above are dropped: they
// mostly belong to a state that has already ended.
TORCHAMP_BODY void PolicyScope::end_below_others() {
  using Info = c10::ThreadLocalDebugInfo;
  std::vector<ThreadSlot> above;  // the uppermost first
  while (Info::current() != nullptr && Info::current() != ours_) {
    std::optional<ThreadSlot> slot = pop_slot();
    if (!slot) break;
    above.push_back(std::move(*slot));
  }
  const bool is_ours_there = Info::current() == ours_;
  Info::_forceCurrentDebugInfo(std::move(before_));
  if (!is_ours_there) return;
  for (; !above.empty(); above.pop_back()) {
    Info::_push(above.back().kind, std::move(above.back().info));
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail
