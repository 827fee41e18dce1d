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
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace torchamp::detail {

// Note [Guards without allocations]
// An outermost guard mostly puts the same policy into its thread's slot as the previous guard. So
// the slot's node is stored for the thread's next guard, which then takes 150 ns instead of 280.
// Exception: an extra has a part in the node, or the policy has predicates; then objects that these
// hold would live longer than the program expects.

/// The stored node of the calling thread's last outermost guard, or nothing.
class SparePolicy {
 public:
  /// To be moved from; null if there is no node that may be pushed again.
  static PolicyInSlot* find() {
    PolicyInSlot* const spare = of_this_thread();
    if (spare == nullptr || spare->node == nullptr) return nullptr;
    // The node has no node below it, so it would hide other slots of the thread, such as a
    // profiler's.
    if (c10::ThreadLocalDebugInfo::current() != nullptr) return nullptr;
    // In a backward pass a scope's policy is a copy with its number: see for_this_backward_pass().
    return this_backward_pass() == ThreadPolicy::no_backward_pass ? spare : nullptr;
  }

  /// Stores the node of an outermost scope, if another guard may use it.
  static void keep(PolicyInSlot&& last) {
    PolicyInSlot* const spare = of_this_thread();
    if (spare != nullptr && is_of_use(*last.policy)) *spare = std::move(last);
  }

 private:
  static bool is_of_use(const ThreadPolicy& policy) {
    const bool has_extras = policy.op_rule_usage || policy.guards || policy.keep.region != 0;
    const bool is_of_backward = policy.backward_pass != ThreadPolicy::no_backward_pass;
    if (!policy.is_in_guard || is_of_backward || has_extras) return false;
    for (const Edit& edit : policy.inherited->edits) {
      if (edit.when.predicate) return false;
    }
    return true;
  }

  /// Null after the thread's object has been destroyed: guards in later destructors have none.
  static PolicyInSlot* of_this_thread() {
    static thread_local bool is_over = false;  // has no destructor: may be read until the end
    struct OfThread : PolicyInSlot {
      ~OfThread() { is_over = true; }
    };
    static thread_local OfThread spare;
    return is_over ? nullptr : &spare;
  }
};

TORCHAMP_BODY PolicyScope::PolicyScope(std::shared_ptr<const ThreadPolicy> policy) {
  if (policy == nullptr) return;
  policy_ = for_this_backward_pass(std::move(policy));
  before_ = c10::ThreadLocalDebugInfo::current();
  const ThreadPolicy* const outer = thread_policy();
  c10::ThreadLocalDebugInfo::_push(policy_slot(), std::const_pointer_cast<ThreadPolicy>(policy_));
  ours_ = c10::ThreadLocalDebugInfo::current().get();
  scripts_outside_ = ScriptSwitch::begin_scope(outer, policy_.get());
}

// Like the other constructor, with an existing node. find() has checked that the thread has no
// slots: so before_ stays null, and there is no outer policy.
TORCHAMP_BODY PolicyScope::PolicyScope(PolicyInSlot&& spare)
    : policy_(std::move(spare.policy)), ours_(spare.node.get()) {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(spare.node));
  scripts_outside_ = ScriptSwitch::begin_scope(/*outer=*/nullptr, policy_.get());
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
  auto top = c10::ThreadLocalDebugInfo::current();
  const bool is_on_top = is_ours(top.get());
  const bool is_outermost = is_on_top && before_ == nullptr;  // leaves the thread without slots
  std::string failure;
  if (!is_on_top) {
    try {
      end_below_others();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  } else {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    // Nodes and policies are immutable, so other threads may hold them meanwhile.
    if (is_outermost) SparePolicy::keep({std::move(policy_), std::move(top)});
  }
  ours_ = nullptr;
  // By the policy that is now active: none if no slot is left.
  ScriptSwitch::end_scope(is_outermost ? nullptr : thread_policy(), scripts_outside_);
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
  while (Info::current() != nullptr && !is_ours(Info::current().get())) {
    std::optional<ThreadSlot> slot = pop_slot();
    if (!slot) break;
    above.push_back(std::move(*slot));
  }
  const bool is_ours_there = is_ours(Info::current().get());
  Info::_forceCurrentDebugInfo(std::move(before_));
  if (!is_ours_there) return;
  for (; !above.empty(); above.pop_back()) {
    Info::_push(above.back().kind, std::move(above.back().info));
  }
}

}  // namespace torchamp::detail
