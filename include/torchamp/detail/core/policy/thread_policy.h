// SPDX-License-Identifier: BSD-3-Clause
// The policy in force on a thread.
#pragma once

#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <memory>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace torchamp::detail {

/// What guards do whatever they are given: because of the environment variable TORCHAMP_POLICY, or
/// on a thread for the time of an extra's trial.
struct GuardOverride {
  virtual ~GuardOverride() = default;

  /// The dtype of a guard that is made now, and asks for `asked` and to be `enabled` or not.
  virtual at::ScalarType dtype_of_guard(at::DeviceType /*on*/, at::ScalarType asked,
                                        bool /*enabled*/) const {
    return asked;
  }

  bool off = false;                          ///< guards run disabled
  std::shared_ptr<const PolicyData> policy;  ///< in place of any other; or null
  bool module_policies = false;              ///< whether those of modules hold all the same
};

/// What a guard puts into the thread's slot. Immutable: LibTorch shares it with other threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  C10_NOINLINE ~ThreadPolicy() override = default;
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard that names no policy
  /// By device, with its table compiled; null outside guards and where they are disabled.
  std::array<std::shared_ptr<const PolicyData>, device_count> in_force;
  bool is_in_guard = false;
  WeightKeep keep;                              // of what is made of weights
  const WeightCasts* weight_casts = nullptr;    // null: LibTorch's
  std::shared_ptr<OpRuleUsage> op_rule_usage;   // of the innermost region with an OpRule
  std::shared_ptr<const GuardOverride> guards;  // of the guards inside; null but for a trial
  /// In which a scope put it in force: see Note [Sums of gradients].
  int backward_pass = no_backward_pass;
  std::shared_ptr<const ThreadPolicy> outside;  // of which it is a copy for the backward pass
  static constexpr int no_backward_pass = -1;
};

/// A copy to change, for a scope inside of the policy's, if there is one.
inline std::shared_ptr<ThreadPolicy> copy_of(const ThreadPolicy* policy) {
  auto copy = policy == nullptr ? std::make_shared<ThreadPolicy>()
                                : std::make_shared<ThreadPolicy>(*policy);
  copy->backward_pass = ThreadPolicy::no_backward_pass;
  copy->outside = nullptr;
  return copy;
}

// Note [Who carries the policy to other threads]
// LibTorch's ThreadLocalState carries the slot, so at::launch does, and so does autograd to the
// threads of a backward pass that begins within a region. One that begins after the guard's end has
// no policy: its ops run in the dtypes of the forward pass. The JIT's switch (ScriptSwitch) and the
// cache's flag are not carried.

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

// Note [Sums of gradients]
// If a tensor was used twice, autograd adds its two gradients by `add`, and the next node accepts
// only the gradients' dtype. A backward pass that began in a region runs in its state, so the
// policy sees these additions, which cannot be told from a node's own. But a forward pass within
// backward (a recomputation, a custom function) has its own scope: so scopes that begin in a
// backward pass record its number, and additions in the pass outside these are left to LibTorch, as
// are sums of AccumulateGrad and of hooks.

/// The number of the backward pass that the calling thread works for, or no_backward_pass.
inline int this_backward_pass() {
  return torch::autograd::get_current_graph_task_id();
}

/// A policy for a scope that begins now: in a backward pass a copy that says so.
inline std::shared_ptr<const ThreadPolicy> for_this_backward_pass(
    std::shared_ptr<const ThreadPolicy> policy) {
  const int pass = this_backward_pass();
  if (pass == ThreadPolicy::no_backward_pass || pass == policy->backward_pass) return policy;
  auto copy = copy_of(policy.get());
  copy->backward_pass = pass;
  copy->outside = policy->outside ? policy->outside : policy;
  return copy;
}

/// Whether autograd adds up gradients by this op.
inline bool adds_gradients(const c10::OperatorName& op) {
  return op.name == "aten::add" && op.overload_name == "Tensor";
}

/// Whether what is added now under the policy may be autograd's own sum, which is left to LibTorch:
/// the thread works for a backward pass, and no PolicyScope has put the policy in force within that
/// pass. See Note [Sums of gradients].
inline bool leaves_sums_alone(const ThreadPolicy& policy) {
  const int pass = this_backward_pass();
  return pass != ThreadPolicy::no_backward_pass && pass != policy.backward_pass;
}

}  // namespace torchamp::detail
