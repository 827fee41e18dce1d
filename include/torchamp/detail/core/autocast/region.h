// SPDX-License-Identifier: BSD-3-Clause
// Regions of a thread: what guards consist of.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Puts a ThreadPolicy into the calling thread's slot, and takes it out again.
class PolicyScope {
 public:
  /// Without a policy the slot stays as it is. `node`: of LibTorch's list of slots, if one has the
  /// policy already.
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy,
                       std::shared_ptr<c10::ThreadLocalDebugInfo> node = nullptr);
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

/// What an AutocastGuard does: see there. The members of AutocastOptions come one by one; a null
/// policy is one that is unset.
class AutocastRegion {
 public:
  AutocastRegion(at::DeviceType device, std::optional<at::ScalarType> dtype, bool enabled,
                 std::optional<bool> cache_enabled, std::optional<WeightCache> asked,
                 const std::shared_ptr<const PolicyData>& policy);
  ~AutocastRegion();

 private:
  DeviceAutocastState before_{};
  bool cache_enabled_before_ = at::autocast::is_autocast_cache_enabled();
  bool dtype_changed_ = false;
  std::uint64_t own_region_ = 0;  // of an outermost guard, if things are kept of weights
  Nesting nesting_;
  std::shared_ptr<OpRuleUsage> op_rule_usage_;  // null: no OpRule, or the outer region's
  int exceptions_ = std::uncaught_exceptions();
  std::optional<PolicyScope> policy_scope_;
};

/// Makes all ready for a region of a device: the policy, and who casts weights, if not LibTorch.
/// Error, of `call`: a strict fp8 rule that the region cannot follow.
void prepare_region(const char* call, const PolicyData& policy, const WeightCasts* casts,
                    at::DeviceType device, at::ScalarType dtype);

// ---- TORCHAMP_POLICY ----------------------------------------------------------------------------

/// Reads the policy in a file; errors begin with `call`.
using PolicyFileReader = std::shared_ptr<const PolicyData> (*)(const std::string& call,
                                                               const std::string& path);

/// Which torchamp/policy_text.h registers; null where no source file includes that.
inline PolicyFileReader policy_file_reader = nullptr;

/// The policy that TORCHAMP_POLICY, being `text`, names.
std::shared_ptr<const PolicyData> environment_policy(const std::string& text,
                                                     PolicyFileReader read_file);

/// What overrides the guards of a thread whose policy this is, which may be null.
const GuardOverride& guard_override(const ThreadPolicy* policy);

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/autocast/region-inl.h"  // IWYU pragma: export
#endif
