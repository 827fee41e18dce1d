// SPDX-License-Identifier: BSD-3-Clause
// The active policy of a thread.
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

namespace TORCHAMP_NAMESPACE::detail {

/// Overrides the options of guards: by the environment variable TORCHAMP_POLICY, or on a thread
/// during an extra's trial.
struct GuardOverride {
  virtual ~GuardOverride() = default;

  /// The dtype of a new guard whose options are `asked` and `enabled`.
  virtual at::ScalarType dtype_of_guard(at::DeviceType /*on*/, at::ScalarType asked,
                                        bool /*enabled*/) const {
    return asked;
  }

  bool off = false;                          ///< guards run disabled
  std::shared_ptr<const PolicyData> policy;  ///< replaces any other policy; or null
  bool module_policies = false;              ///< whether modules still have their own policies
};

/// The data that a guard puts into the thread's slot. Immutable: LibTorch shares it with other
/// threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  C10_NOINLINE ~ThreadPolicy() override = default;
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard without a policy
  /// By device, with its table compiled; null outside guards and if they are disabled.
  std::array<std::shared_ptr<const PolicyData>, device_count> in_force;
  bool is_in_guard = false;
  WeightKeep keep;                              // how long casts of weights are kept
  const WeightCasts* weight_casts = nullptr;    // null: LibTorch's
  std::shared_ptr<OpRuleUsage> op_rule_usage;   // of the innermost region with an OpRule
  std::shared_ptr<const GuardOverride> guards;  // for inner guards; null except during a trial
  /// The backward pass in which a scope set it: see Note [Sums of gradients].
  int backward_pass = no_backward_pass;
  std::shared_ptr<const ThreadPolicy> outside;  // the original of a copy for a backward pass
  static constexpr int no_backward_pass = -1;
};

/// A copy to change, for a scope inside the policy's scope; a new one if `policy` is null.
inline std::shared_ptr<ThreadPolicy> copy_of(const ThreadPolicy* policy) {
  auto copy = policy == nullptr ? std::make_shared<ThreadPolicy>()
                                : std::make_shared<ThreadPolicy>(*policy);
  copy->backward_pass = ThreadPolicy::no_backward_pass;
  copy->outside = nullptr;
  return copy;
}

// Note [Who carries the policy to other threads]
// LibTorch's ThreadLocalState carries the slot. So at::launch carries it, and autograd carries it
// to the threads of a backward pass that begins in a region. A backward pass that begins after
// the guard's end has no policy: its ops run in the dtypes of the forward pass. The JIT's switch
// (ScriptSwitch) and the cache's flag are not carried.

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

// Note [Sums of gradients]
// If a tensor was used twice, autograd adds its two gradients by `add`, and the next node accepts
// only the gradients' dtype. A backward pass that began in a region runs in the region's state, so
// its additions reach the policy, which cannot distinguish them from additions of a node itself.
// But a forward pass inside backward (a recomputation, a custom function) has its own scope. So
// scopes that begin in a backward pass record its number. In the pass, but outside such scopes,
// additions keep LibTorch's rule; so do sums of AccumulateGrad and of hooks.

/// The number of the backward pass that the calling thread works for, or no_backward_pass.
inline int this_backward_pass() {
  return torch::autograd::get_current_graph_task_id();
}

/// The policy for a scope that begins now: in a backward pass a copy with the number of the pass.
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

/// Whether an addition under the policy may be autograd's own sum, which keeps LibTorch's rule: the
/// thread works for a backward pass, and no PolicyScope has set the policy in that pass. See
/// Note [Sums of gradients].
inline bool leaves_sums_alone(const ThreadPolicy& policy) {
  const int pass = this_backward_pass();
  return pass != ThreadPolicy::no_backward_pass && pass != policy.backward_pass;
}

}  // namespace TORCHAMP_NAMESPACE::detail
