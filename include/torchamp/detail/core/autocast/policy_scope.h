// SPDX-License-Identifier: BSD-3-Clause
// The two parts of a guard: a level of nesting, and a policy in the thread's slot.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <thread>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A level of the calling thread's autocast nesting. LibTorch counts the levels. The code that ends
/// the outermost level clears LibTorch's cache of casts, here AutocastRegion::restore.
class Nesting {
 public:
  /// Opens the level, and returns its depth: 1 for the outermost.
  int enter() {
    number_ = ++guards;
    return level_ = at::autocast::increment_nesting();
  }

  /// Closes the level, and inner levels that are still open. Returns the depth after that.
  int leave() {
    is_in_order_ = guards-- <= number_;
    return close();
  }

  /// After leave(), at the end of the destructor `guard`: warns if a guard that was made later had
  /// not ended.
  void warn_of_order(const char* guard) const noexcept {
    if (is_in_order_) return;
    warn_in_destructor({guard,
                        ": a guard that was made later on this thread has not ended. Its end will "
                        "restore the state at its construction, so autocast may stay on. End "
                        "guards in reverse order: make them local variables."});
  }

 private:
  static inline thread_local int guards = 0;  // guards that have not ended

  /// LibTorch returns the depth only from calls that change it.
  int close() const {
    const int around = level_ - 1;  // the depth around the level
    int depth = at::autocast::decrement_nesting();
    // An outer guard has ended before this guard, and has already closed this level.
    if (depth < around) return at::autocast::increment_nesting();
    while (depth > around) depth = at::autocast::decrement_nesting();
    return depth;
  }

  int level_ = 0;
  int number_ = 0;  // of this guard among the guards
  bool is_in_order_ = true;
};

// Note [A thread's slots]
// LibTorch stores a thread's slots as a list, c10::ThreadLocalDebugInfo. A node has one slot and a
// reference to the node below it, and is immutable; the thread has a reference to the uppermost
// node. _push() adds a new node on top; _forceCurrentDebugInfo() replaces the thread's uppermost
// node. So a scope ends by restoring the node that was uppermost at its begin. Saved states and
// other threads may refer to our node, and to the policy in it, for as long as they need.

/// Puts a ThreadPolicy into the calling thread's slot, and removes it at the end: see
/// Note [A thread's slots].
class PolicyScope {
 public:
  /// Null: the slot is unchanged.
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy);
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;
  ~PolicyScope();

  /// For the destructor `guard` ("~AutocastGuard"): ends the scope. If the calling thread did not
  /// create the scope, it warns and returns false, and the destructor must leave all state
  /// unchanged.
  bool end_of(const char* guard);

 private:
  bool is_on_its_thread() const { return thread_ == std::this_thread::get_id(); }
  void end() noexcept;
  void end_below_others();

  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;  // the thread's uppermost node before ours
  std::shared_ptr<c10::ThreadLocalDebugInfo> ours_;    // null: nothing was pushed, or it has ended
  bool scripts_outside_ = true;                        // see ScriptSwitch
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/autocast/policy_scope-inl.h"  // IWYU pragma: export
#endif
