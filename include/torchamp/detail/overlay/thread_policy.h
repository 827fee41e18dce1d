// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/operator_name.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/version.h"

namespace torchamp::detail {

struct GuardOverride;

/// What a guard puts into the thread's slot. Immutable: LibTorch shares it with other threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard that names no policy
  /// By device, with its table compiled; null outside guards and where they are disabled.
  std::array<std::shared_ptr<const PolicyData>, device_count> in_force;
  bool is_in_guard = false;
  WeightKeep keep;                              // of what is made of weights
  const WeightCasts* casts = nullptr;           // of weights; null: LibTorch's
  std::shared_ptr<OpRuleUsage> op_rule_usage;   // of the innermost region with an OpRule
  std::shared_ptr<const GuardOverride> guards;  // of the guards inside; null but for a trial
  /// The backward pass, by autograd's number, in which a scope put it in force; else none. See
  /// Note [Sums of gradients].
  int backward_pass = no_backward_pass;
  /// Of which it is a copy, made for the backward pass; null outside of one.
  std::shared_ptr<const ThreadPolicy> outside;

  static constexpr int no_backward_pass = -1;
};

/// A copy to change, for a scope inside of the policy's, if there is one.
inline std::shared_ptr<ThreadPolicy> copy_of(const ThreadPolicy* policy) {
  auto copy = std::make_shared<ThreadPolicy>();
  if (policy != nullptr) *copy = *policy;
  copy->backward_pass = ThreadPolicy::no_backward_pass;
  copy->outside = nullptr;
  return copy;
}

// Note [Sums of gradients]
// Where a tensor was used twice autograd adds its two gradients by `add`, between the nodes of the
// graph, and hands the sum to the next node as it is, whose kernels take it in the gradients' dtype
// only. A backward pass that began in a region runs in its state, so these additions come to the
// policy. Nothing tells them from a node's own. But a forward pass within backward (a
// recomputation, a custom function) has a scope of its own: so scopes that begin in a backward pass
// note its number, and what is added in the pass outside of these is left to LibTorch, as are sums
// of AccumulateGrad and of hooks.

/// The number of the backward pass that the calling thread works for, or no_backward_pass.
inline int this_backward_pass() {
  return torch::autograd::get_current_graph_task_id();
}

/// Whether autograd adds up gradients by this op.
inline bool adds_gradients(const c10::OperatorName& op) {
  return op.name == "aten::add" && op.overload_name == "Tensor";
}

/// Whether what is added now is left to LibTorch: see Note [Sums of gradients].
inline bool leaves_sums_alone(const ThreadPolicy& policy) {
  const int pass = this_backward_pass();
  return pass != ThreadPolicy::no_backward_pass && pass != policy.backward_pass;
}

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

/// The policy in force on the calling thread for a device, by its index; null outside
/// guards and where they are disabled.
inline const PolicyData* policy_in_force(std::size_t device_index) {
  const ThreadPolicy* policy = thread_policy();
  return policy == nullptr ? nullptr : policy->in_force[device_index].get();
}

/// While it lives, casts of the calling thread neither come from LibTorch's cache of cast weights,
/// which all threads share, nor go there; guards do not switch it on.
class NoCastCache {
 public:
  NoCastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
    ++depth;
  }
  NoCastCache(const NoCastCache&) = delete;
  NoCastCache& operator=(const NoCastCache&) = delete;
  ~NoCastCache() {
    --depth;
    at::autocast::set_autocast_cache_enabled(before_);
  }

  /// Sets LibTorch's flag, as far as it may be on.
  static void set_flag(bool enabled) {
    at::autocast::set_autocast_cache_enabled(enabled && depth == 0);
  }

 private:
  static inline thread_local int depth = 0;
  bool before_;
};

struct ThreadPolicy;

/// A policy to put into a thread's slot, and the node of LibTorch's list of slots that has it
/// already; null if there is none yet.
struct PolicyNode {
  std::shared_ptr<const ThreadPolicy> policy{};
  std::shared_ptr<c10::ThreadLocalDebugInfo> node{};
};

// Note [Guards without allocations]
// What an outermost guard puts into its thread's slot is mostly what the thread's last one has put
// there, but for the region's number, and nobody else holds it any more: no thread has taken over
// the state, no AutocastState remembers it. So it is kept for the thread's next guard. (Not if the
// policy has predicates: what they hold is not to live longer than the program wants it to.)

/// What the calling thread's last outermost guard has left behind.
class SparePolicy {
 public:
  SparePolicy(const SparePolicy&) = delete;
  SparePolicy& operator=(const SparePolicy&) = delete;
  ~SparePolicy() { is_over() = true; }

  /// Null if there is none, or if somebody has a share in it.
  static const ThreadPolicy* look() {
    if (is_over()) return nullptr;
    const PolicyNode& spare = of_this_thread().spare_;
    return spare.node && is_unshared(spare) ? spare.policy.get() : nullptr;
  }

  /// What look() has found, for another region.
  static PolicyNode take(std::uint64_t region) {
    PolicyNode spare = std::move(of_this_thread().spare_);
    std::const_pointer_cast<ThreadPolicy>(spare.policy)->keep.region = region;
    return spare;
  }

  /// Keeps what a scope that was outermost has taken out of the slot, if it may be of use.
  static void leave(PolicyNode last) {
    const ThreadPolicy& policy = *last.policy;
    if (is_over() || !policy.is_in_guard || policy.op_rule_usage || policy.guards ||
        policy.outside || has_predicates(*policy.inherited) || !is_unshared(last)) {
      return;
    }
    of_this_thread().spare_ = std::move(last);
  }

 private:
  SparePolicy() = default;

  static SparePolicy& of_this_thread() {
    static thread_local SparePolicy spare;
    return spare;
  }
  /// Guards in destructors that run after ours have no spare.
  static bool& is_over() {
    static thread_local bool over = false;
    return over;
  }

  static bool has_predicates(const PolicyData& policy) {
    for (const Edit& edit : policy.edits) {
      if (edit.when.predicate) return true;
    }
    return false;
  }

  static bool is_unshared(const PolicyNode& of) {
    constexpr long ours_and_the_nodes = 2;
    if (of.node.use_count() != 1 || of.policy.use_count() != ours_and_the_nodes) return false;
    std::atomic_thread_fence(std::memory_order_acquire);  // after those who had a share
    return true;
  }

  PolicyNode spare_;
};

}  // namespace torchamp::detail
