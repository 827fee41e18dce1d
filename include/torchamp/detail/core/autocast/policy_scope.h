// SPDX-License-Identifier: BSD-3-Clause
// What a guard puts on its thread: a level of nesting, and a policy in the thread's slot.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <thread>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// A level of the calling thread's autocast nesting. LibTorch counts the levels; whoever ends the
/// outermost clears its cache of casts, here AutocastRegion::restore.
class Nesting {
 public:
  /// Opens the level, and returns its depth: 1 for the outermost.
  int enter() {
    number_ = ++guards;
    return level_ = at::autocast::increment_nesting();
  }

  /// Closes the level, and the inner ones that are still open. Returns the depth after that.
  int leave() {
    is_in_order_ = guards-- <= number_;
    return close();
  }

  /// After leave(), at the end of the destructor `guard`: warns if a guard that was made later had
  /// not ended.
  void warn_of_order(const char* guard) const noexcept {
    if (is_in_order_) return;
    warn_in_destructor(
        {guard,
         ": a guard that was made later on this thread has not ended. When it ends, it restores "
         "the state that it found, so autocast may stay on. End guards in reverse order: make "
         "them local variables."});
  }

 private:
  static inline thread_local int guards = 0;  // that have not ended

  /// LibTorch tells the depth only by changing it.
  int close() const {
    const int around = level_ - 1;  // the depth around the level
    int depth = at::autocast::decrement_nesting();
    // A guard around this one has ended before it, and has closed this level as an inner one.
    if (depth < around) return at::autocast::increment_nesting();
    while (depth > around) depth = at::autocast::decrement_nesting();
    return depth;
  }

  int level_ = 0;
  int number_ = 0;  // of this one among the guards
  bool is_in_order_ = true;
};

// Note [A thread's slots]
// LibTorch keeps a thread's slots as a list, c10::ThreadLocalDebugInfo. A node has one slot and a
// share in the node below it, and is not changed after it was made; the thread has the uppermost
// one. _push() puts a new node on top; _forceCurrentDebugInfo() gives the thread another uppermost
// one. So a scope ends by giving back the node that was uppermost at its begin. Saved states and
// other threads that have a share in our node keep it, and the policy in it, for as long as they
// want.

/// Puts a ThreadPolicy into the calling thread's slot, and takes it out again: see
/// Note [A thread's slots].
class PolicyScope {
 public:
  /// Null: the slot stays as it is.
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy);
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;
  ~PolicyScope();

  /// For the destructor of a guard, `guard` ("~AutocastGuard"): ends the scope. False, after a
  /// warning, on another thread than the one that made it, which must leave all state as it is.
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

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/autocast/policy_scope-inl.h"  // IWYU pragma: export
#endif
