// SPDX-License-Identifier: BSD-3-Clause
// A ThreadPolicy in a thread's slot.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <thread>
#include <utility>

#include "torchamp/detail/core/autocast/spare_policy.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Puts a ThreadPolicy into the calling thread's slot, and takes it out again.
class PolicyScope {
 public:
  /// Without a policy the slot stays as it is.
  explicit PolicyScope(PolicyInSlot&& pushed);
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy)
      : PolicyScope(PolicyInSlot{std::move(policy)}) {}
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;
  ~PolicyScope();

  /// For the destructor of a guard, `guard` ("~AutocastGuard"): ends the scope. False, after a
  /// warning, on another thread than the one that made it, which must leave all state as it is.
  bool end_of(const char* guard);

 private:
  void end() noexcept;
  bool take_out();

  std::shared_ptr<const ThreadPolicy> policy_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  const c10::ThreadLocalDebugInfo* ours_ = nullptr;
  bool scripts_outside_ = true;  // see ScriptSwitch
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/autocast/policy_scope-inl.h"  // IWYU pragma: export
#endif
