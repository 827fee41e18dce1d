// SPDX-License-Identifier: BSD-3-Clause
// Regions of a thread: what guards consist of.
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

namespace torchamp::detail {

/// What is in force in a region, all options resolved.
struct RegionState {
  DeviceAutocastState autocast;  // LibTorch's switch and dtype
  DeviceAutocastState around;    // what these are outside
  const ThreadPolicy* outer;     // the thread's policy outside; null if it has none
  std::size_t device_index;
  /// In force if autocast is on; inner guards inherit it. Lives as long as the guard's options and
  /// the thread's policy around it.
  const std::shared_ptr<const PolicyData>& policy;
  WeightKeep::Until keep_until;       // of what is made of weights
  const WeightCasts* weight_casts;    // null: LibTorch's
  std::optional<bool> cache_enabled;  // LibTorch's flag; unset: as it is

  bool changes_dtype() const { return autocast.dtype != around.dtype; }
  /// The policy that ops follow in the region; null: LibTorch's own kernels alone.
  const PolicyData* policy_in_force() const { return autocast.enabled ? policy.get() : nullptr; }
  /// The rule of that policy which an extra carries out; null if there is none.
  const OpRule* op_rule() const {
    return autocast.enabled && is_16_bit(autocast.dtype) ? policy->op_rule() : nullptr;
  }
  /// Whether a thread's policy says all this of the device.
  bool is_in(const ThreadPolicy& thread) const {
    return thread.inherited == policy && thread.in_force[device_index].get() == policy_in_force() &&
           thread.keep.until == keep_until && thread.weight_casts == weight_casts;
  }
};

/// What a guard with these options puts in force on the calling thread, whose policy is `outer` or
/// null. Makes ready all that the region needs, and changes nothing on the thread, so that an error
/// leaves its state as it was.
RegionState resolve(at::DeviceType device, const AutocastOptions& options,
                    const ThreadPolicy* outer);

/// Makes all ready for a region of a device: the policy, and who casts weights, if not LibTorch.
/// Error, of `call`: a strict fp8 rule that the region cannot follow.
void prepare_region(const char* call, const PolicyData& policy, const WeightCasts* weight_casts,
                    std::size_t device_index, at::ScalarType dtype);

/// Tells extras of one region: KeptWeights, of the outermost one, and the OpRule of its policy.
class RegionListeners {
 public:
  RegionListeners() = default;
  RegionListeners(const RegionListeners&) = delete;
  RegionListeners& operator=(const RegionListeners&) = delete;
  /// The region ends, and with it what KeptWeights keep for it.
  ~RegionListeners() {
    if (kept_region_ != 0) kept_weights()->end_region(kept_region_);
  }

  /// `inner` will be in force; `rule`, which may be null, is that of its policy for the region.
  void begin(ThreadPolicy& inner, const OpRule* rule) {
    if (rule != nullptr) {
      usage_ = inner.op_rule_usage = rule->make_usage(inner.op_rule_usage);
      exceptions_ = std::uncaught_exceptions();
    }
    if (inner.keep.region != 0) return;
    KeptWeights* const kept = kept_weights();
    if (kept != nullptr) inner.keep.region = kept_region_ = kept->begin_region();
  }

  /// Warns of an unused rule, which may run the program's code: after all else is restored.
  void end_op_rule() const noexcept {
    if (usage_ == nullptr || std::uncaught_exceptions() != exceptions_) return;
    try {
      usage_->warn_if_unused();
    } catch (...) {  // by the program's warning handler
    }
  }

 private:
  std::uint64_t kept_region_ = 0;       // that this region has begun
  std::shared_ptr<OpRuleUsage> usage_;  // of this region's policy; null without a rule
  int exceptions_ = 0;                  // that flew at the region's begin; only with a usage
};

/// What an AutocastGuard does: resolves its options, pushes what is to be in force, and restores
/// what was.
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
  PolicyScope policy_scope_;  // after the listeners, which have a part in what it pushes
};

}  // namespace torchamp::detail
