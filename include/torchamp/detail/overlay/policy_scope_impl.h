// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <exception>
#include <memory>
#include <utility>

#include "torchamp/detail/overlay/policy_scope.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/script_switch.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/version.h"

namespace torchamp::detail {

TORCHAMP_BODY PolicyScope::PolicyScope(PolicyNode policy) : policy_(std::move(policy.policy)) {
  using Info = c10::ThreadLocalDebugInfo;
  if (!policy_) return;
  const int pass = this_backward_pass();
  if (pass != policy_->backward_pass && pass != ThreadPolicy::no_backward_pass) {
    auto copy = copy_of(policy_.get());  // see Note [Sums of gradients]
    copy->backward_pass = pass;
    copy->outside = policy_->outside ? policy_->outside : policy_;
    policy_ = std::move(copy);
    policy.node = nullptr;
  }
  before_ = Info::current();
  const ThreadPolicy* const outer = before_ ? thread_policy() : nullptr;
  if (policy.node) {
    ours_ = policy.node.get();
    Info::_forceCurrentDebugInfo(std::move(policy.node));
  } else {
    Info::_push(policy_slot(), std::const_pointer_cast<ThreadPolicy>(policy_));
    ours_ = Info::current().get();
  }
  scripts_outside_ = ScriptSwitch::begin_scope(outer, policy_.get());
}

TORCHAMP_BODY bool PolicyScope::end_of(const char* guard) {
  if (!is_on_its_thread()) {
    TORCH_WARN(guard,
               ": destroyed by another thread than the one that made it. Its state was not "
               "restored there. Keep a guard in the scope that it covers.");
    return false;
  }
  end();
  return true;
}

TORCHAMP_BODY void PolicyScope::end() noexcept {
  if (ours_ == nullptr || !is_on_its_thread()) return;
  auto node = c10::ThreadLocalDebugInfo::current();
  const bool is_on_top = node.get() == ours_;
  const bool is_outermost = is_on_top && before_ == nullptr;
  if (is_on_top) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    if (is_outermost) SparePolicy::leave({std::move(policy_), std::move(node)});
  } else {
    take_out_from_below();
  }
  ours_ = nullptr;
  ScriptSwitch::end_scope(is_outermost ? nullptr : thread_policy(), scripts_outside_);
}

// Note [Slots pushed inside a scope]
// LibTorch keeps a thread's slots as a stack. A profiler that is started inside a scope and
// outlives it has its slot above ours; putting back what was there before us would end the
// profiler. So what lies above is lifted off, and put back on what was below us.
TORCHAMP_BODY void PolicyScope::take_out_from_below() noexcept {
  try {
    take_out();
  } catch (const std::exception& error) {
    TORCH_WARN("~AutocastGuard: cannot restore the thread's slots: ", error.what());
  }
}

// Returns whether our slot was there. Without it, what lay above belongs to a state that has been
// left, and is dropped.
TORCHAMP_BODY bool PolicyScope::take_out() {
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

TORCHAMP_BODY bool PolicyScope::on_top(c10::DebugInfoKind kind) {
  try {
    (void)c10::ThreadLocalDebugInfo::_peek(kind);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace torchamp::detail
