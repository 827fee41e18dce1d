// SPDX-License-Identifier: BSD-3-Clause
// Regions of a thread: the implementation of guards.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/autocast/environment.h"
#include "torchamp/detail/core/autocast/policy_scope.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
struct AutocastOptions;
}

namespace TORCHAMP_NAMESPACE::detail {

/// The state in a region, with all options resolved.
struct RegionState {
  DeviceAutocastState autocast;  // LibTorch's switch and dtype
  DeviceAutocastState around;    // the same outside
  const ThreadPolicy* outer;     // the thread's policy outside; null if it has none
  std::size_t device_index;
  /// Active if autocast is on; inner guards inherit it. Lives as long as the guard's options and
  /// the thread's outer policy.
  const std::shared_ptr<const PolicyData>& policy;
  WeightKeep::Until keep_until;       // how long casts of weights are kept
  const WeightCasts* weight_casts;    // null: LibTorch's
  std::optional<bool> cache_enabled;  // LibTorch's flag; unset: unchanged

  bool changes_dtype() const { return autocast.dtype != around.dtype; }
  /// The policy that ops follow in the region; null: LibTorch's own kernels alone.
  const PolicyData* policy_in_force() const { return autocast.enabled ? policy.get() : nullptr; }
  /// The rule of that policy that an extra executes; null if there is none.
  const OpRule* op_rule() const {
    return autocast.enabled && is_16_bit(autocast.dtype) ? policy->op_rule() : nullptr;
  }
  /// Whether a thread's policy has the same state for the device.
  bool is_in(const ThreadPolicy& thread) const {
    return thread.inherited == policy && thread.in_force[device_index].get() == policy_in_force() &&
           thread.keep.until == keep_until && thread.weight_casts == weight_casts;
  }
};

/// Returns the state of a region with these options on the calling thread, whose policy is `outer`
/// or null. Prepares everything that the region needs, and changes nothing on the thread, so that
/// an error leaves the thread's state unchanged.
RegionState resolve(at::DeviceType device, const AutocastOptions& options,
                    const ThreadPolicy* outer);

/// Prepares a region of a device: the policy, and the casts of weights if LibTorch does not make
/// them. Error, which names `call`: a strict fp8 rule that the region cannot follow.
void prepare_region(const char* call, const PolicyData& policy, const WeightCasts* weight_casts,
                    std::size_t device_index, at::ScalarType dtype);

/// Reports a region to extras: the outermost region to KeptWeights, and each region to the OpRule
/// of its policy.
class RegionListeners {
 public:
  RegionListeners() = default;
  RegionListeners(const RegionListeners&) = delete;
  RegionListeners& operator=(const RegionListeners&) = delete;
  /// Ends the region: KeptWeights drop their entries for it.
  ~RegionListeners() {
    if (kept_region_ != 0) kept_weights()->end_region(kept_region_);
  }

  /// `inner` will be active; `rule`, which may be null, is the OpRule of its policy for the region.
  void begin(ThreadPolicy& inner, const OpRule* rule) {
    if (rule != nullptr) {
      usage_ = inner.op_rule_usage = rule->make_usage(inner.op_rule_usage);
      exceptions_ = std::uncaught_exceptions();
    }
    if (inner.keep.region != 0) return;
    KeptWeights* const kept = kept_weights();
    if (kept != nullptr) inner.keep.region = kept_region_ = kept->begin_region();
  }

  /// Warns of an unused rule. This may run the program's code, so it comes after everything is
  /// restored.
  void end_op_rule() const noexcept {
    if (usage_ == nullptr || std::uncaught_exceptions() != exceptions_) return;
    try {
      usage_->warn_if_unused();
    } catch (...) {  // by the program's warning handler
    }
  }

 private:
  std::uint64_t kept_region_ = 0;       // the number of the region that this object has begun
  std::shared_ptr<OpRuleUsage> usage_;  // of this region's policy; null without a rule
  int exceptions_ = 0;                  // active at the region's begin; only with a usage
};

/// The implementation of an AutocastGuard: resolves the options, pushes the new state, and restores
/// the old state.
class AutocastRegion {
 public:
  AutocastRegion(at::DeviceType device, const AutocastOptions& options);
  ~AutocastRegion();

 private:
  explicit AutocastRegion(const RegionState& inside);
  /// Throws nothing: an exception here would find no region to restore.
  void push(const RegionState& inside) noexcept;
  void restore() noexcept;

  const DeviceAutocastState before_;
  const bool cache_enabled_before_ = at::autocast::is_autocast_cache_enabled();
  const bool dtype_changes_;
  Nesting nesting_;
  RegionListeners listeners_;
  PolicyScope policy_scope_;  // after the listeners, which contribute to the policy that it pushes
};

}  // namespace TORCHAMP_NAMESPACE::detail
