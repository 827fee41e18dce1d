// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <exception>
#include <memory>
#include <utility>

#include "torchamp/detail/bodies.h"
#include "torchamp/detail/overlay/policy_scope.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/spare_policy.h"
#include "torchamp/detail/overlay/thread_policy.h"

namespace torchamp::detail {

TORCHAMP_BODY PolicyScope::PolicyScope(PolicyNode policy) : policy_(std::move(policy.policy)) {
  using Info = c10::ThreadLocalDebugInfo;
  if (!policy_) return;
  scripts_were_optimized_ = has_policy_in_force() || torch::jit::getGraphExecutorOptimize();
  before_ = Info::current();
  if (policy.node) {
    ours_ = policy.node.get();
    Info::_forceCurrentDebugInfo(std::move(policy.node));
  } else {
    Info::_push(policy_slot(), std::const_pointer_cast<ThreadPolicy>(policy_));
    ours_ = Info::current().get();
  }
  set_optimization_of_scripts();
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
  if (node.get() == ours_) {
    const bool is_outermost = before_ == nullptr;
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    if (is_outermost) SparePolicy::leave({std::move(policy_), std::move(node)});
  } else {
    take_out_from_below();
  }
  ours_ = nullptr;
  set_optimization_of_scripts();
}

TORCHAMP_BODY bool PolicyScope::has_policy_in_force() {
  const ThreadPolicy* policy = thread_policy();
  if (policy == nullptr) return false;
  for (const auto& of_device : policy->in_force) {
    if (of_device) return true;
  }
  return false;
}

// See Note [Derivatives of scripts].
TORCHAMP_BODY void PolicyScope::set_optimization_of_scripts() const {
  torch::jit::setGraphExecutorOptimize(!has_policy_in_force() && scripts_were_optimized_);
}

// Note [Derivatives of scripts]
// Where gradients are wanted, an optimised script is differentiated by the JIT. Its derivatives
// take what the ops of the script were given, and know nothing of the casts that the dispatcher
// makes: the backward of a 16-bit `mm` would multiply by the fp32 weight, which is an error. So
// scripts run as they are written under a policy, op by op and recorded by autograd. The switch
// is the thread's own; LibTorch does not carry it to the threads that take over a state.

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
