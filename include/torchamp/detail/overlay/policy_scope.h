// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <thread>
#include <utility>

#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Puts a ThreadPolicy into the calling thread's slot, and takes it out again.
class PolicyScope {
 public:
  /// Without a policy the slot stays as it is.
  explicit PolicyScope(PolicyNode policy);
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy)
      : PolicyScope(PolicyNode{.policy = std::move(policy)}) {}

  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

  ~PolicyScope() { end(); }

  /// For the destructor of a guard, `guard` ("~AutocastGuard"): ends the scope. False, after a
  /// warning, on another thread than the one that made it, which must leave all state as it is.
  bool end_of(const char* guard);

 private:
  bool is_on_its_thread() const { return thread_ == std::this_thread::get_id(); }
  void end() noexcept;
  void take_out_from_below() noexcept;
  bool take_out();
  static bool on_top(c10::DebugInfoKind kind);

  std::shared_ptr<const ThreadPolicy> policy_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  const c10::ThreadLocalDebugInfo* ours_ = nullptr;
  bool scripts_outside_ = true;  // see ScriptSwitch
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/overlay/policy_scope_impl.h"  // IWYU pragma: export
#endif
