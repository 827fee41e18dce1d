// SPDX-License-Identifier: BSD-3-Clause
// Regions of a thread: what guards consist of.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/autocast/environment.h"
#include "torchamp/detail/core/autocast/policy_scope.h"
#include "torchamp/detail/core/autocast/region_listeners.h"
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
  std::size_t device_index;
  /// In force if autocast is on; inner guards inherit it. Lives as long as the guard's options and
  /// the thread's policy around it.
  const std::shared_ptr<const PolicyData>& policy;
  WeightKeep::Until keep_until;       // of what is made of weights
  const WeightCasts* casts;           // of weights; null: LibTorch's
  std::optional<bool> cache_enabled;  // LibTorch's flag; unset: as it is

  /// The policy that ops follow in the region; null: LibTorch's own kernels alone.
  const PolicyData* policy_in_force() const { return autocast.enabled ? policy.get() : nullptr; }
  /// The rule of that policy which an extra carries out; null if there is none.
  const OpRule* op_rule() const {
    return autocast.enabled && is_16_bit(autocast.dtype) ? policy->op_rule() : nullptr;
  }
  /// Whether a thread's policy says all this of the device.
  bool is_in(const ThreadPolicy& thread) const {
    return thread.inherited == policy && thread.in_force[device_index].get() == policy_in_force() &&
           thread.keep.until == keep_until && thread.casts == casts;
  }
};

/// What a guard with these options puts in force on the calling thread, whose policy is `outer` or
/// null. Makes ready all that the region needs, and changes nothing on the thread, so that an error
/// leaves its state as it was.
RegionState resolve(at::DeviceType device, const AutocastOptions& options,
                    const ThreadPolicy* outer);

/// Makes all ready for a region of a device: the policy, and who casts weights, if not LibTorch.
/// Error, of `call`: a strict fp8 rule that the region cannot follow.
void prepare_region(const char* call, const PolicyData& policy, const WeightCasts* casts,
                    at::DeviceType device, at::ScalarType dtype);

/// What an AutocastGuard does: resolves its options, pushes what is to be in force, and restores
/// what was.
class AutocastRegion {
 public:
  AutocastRegion(at::DeviceType device, const AutocastOptions& options);
  ~AutocastRegion();

 private:
  void push(const RegionState& inside, const ThreadPolicy* outer);
  void restore();

  DeviceAutocastState before_{};
  bool cache_enabled_before_ = at::autocast::is_autocast_cache_enabled();
  bool dtype_changed_ = false;
  Nesting nesting_;
  RegionListeners listeners_;
  std::optional<PolicyScope> policy_scope_;
};

}  // namespace torchamp::detail
