// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "torchamp/detail/overlay/policy_node.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/data.h"

namespace torchamp::detail {

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
