// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "torchamp/detail/core/autocast/policy_scope.h"
#include "torchamp/detail/core/autocast/script_switch.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace torchamp::detail {

TORCHAMP_BODY PolicyScope::PolicyScope(PolicyInSlot&& pushed) : policy_(std::move(pushed.policy)) {
  if (!policy_) return;
  const int pass = this_backward_pass();
  if (pass != policy_->backward_pass && pass != ThreadPolicy::no_backward_pass) {
    auto copy = copy_of(policy_.get());  // see Note [Sums of gradients]
    copy->backward_pass = pass;
    copy->outside = policy_->outside ? policy_->outside : policy_;
    policy_ = std::move(copy);
    pushed.node = nullptr;
  }
  using Info = c10::ThreadLocalDebugInfo;
  before_ = Info::current();
  const ThreadPolicy* const outer = before_ ? thread_policy() : nullptr;
  if (pushed.node != nullptr) {
    ours_ = pushed.node.get();
    Info::_forceCurrentDebugInfo(std::move(pushed.node));
  } else {
    Info::_push(policy_slot(), std::const_pointer_cast<ThreadPolicy>(policy_));
    ours_ = Info::current().get();
  }
  scripts_outside_ = ScriptSwitch::begin_scope(outer, policy_.get());
}

TORCHAMP_BODY PolicyScope::~PolicyScope() {
  end();
}

TORCHAMP_BODY bool PolicyScope::end_of(const char* guard) {
  if (thread_ != std::this_thread::get_id()) {
    warn({guard,
          ": destroyed by another thread than the one that made it, so that thread's state was not "
          "restored. Keep a guard in the scope that it covers."});
    return false;
  }
  end();
  return true;
}

// Note [Slots pushed inside a scope]
// LibTorch keeps a thread's slots as a stack. A profiler that is started inside a scope and
// outlives it has its slot above ours, which is lifted off, and put back on what was below us.
TORCHAMP_BODY void PolicyScope::end() noexcept {
  if (ours_ == nullptr || thread_ != std::this_thread::get_id()) return;
  PolicyInSlot last{std::move(policy_), c10::ThreadLocalDebugInfo::current()};
  const bool is_outermost = before_ == nullptr && last.node.get() == ours_;
  if (last.node.get() == ours_) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    if (is_outermost) SparePolicy::keep(std::move(last));
  } else {
    try {
      take_out();
    } catch (const std::exception& error) {
      warn({"~AutocastGuard: cannot restore the thread's slots: ", error.what()});
    }
  }
  ours_ = nullptr;
  ScriptSwitch::end_scope(is_outermost ? nullptr : thread_policy(), scripts_outside_);
}

// Returns whether our slot was there. Without it, what lay above belongs to a state that has been
// left, and is dropped.
TORCHAMP_COLD bool PolicyScope::take_out() {
  using Info = c10::ThreadLocalDebugInfo;
  using Kind = c10::DebugInfoKind;
  const bool at_ours = Info::current().get() == ours_;
  if (Info::current() && !at_ours) {
    for (const Kind kind :
         {policy_slot(), Kind::PRODUCER_INFO, Kind::MOBILE_RUNTIME_INFO, Kind::PROFILER_STATE,
          Kind::INFERENCE_CONTEXT, Kind::PARAM_COMMS_INFO, Kind::TEST_INFO, Kind::TEST_INFO_2}) {
      std::shared_ptr<c10::DebugInfoBase> above;
      try {
        above = Info::_pop(kind);
      } catch (const c10::Error&) {
        continue;  // another kind is on top
      }
      const bool found = take_out();
      if (found) Info::_push(kind, std::move(above));
      return found;
    }
  }
  Info::_forceCurrentDebugInfo(std::move(before_));
  return at_ours;
}

}  // namespace torchamp::detail
