// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/policy_scope.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/version.h"

namespace torchamp::detail {

class PolicyData;

/// What an AutocastGuard does: see there. The members of AutocastOptions come one by one; a null
/// policy is one that is unset.
class AutocastRegion {
 public:
  AutocastRegion(at::DeviceType device, std::optional<at::ScalarType> dtype, bool enabled,
                 std::optional<bool> cache_enabled, std::optional<WeightCache> cache,
                 const std::shared_ptr<const PolicyData>& policy);

  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;

  ~AutocastRegion();

 private:
  /// The arguments after all checks, so that the constructor changes nothing before it cannot fail.
  struct Checked {
    Checked(at::DeviceType on_device, std::optional<at::ScalarType> asked_dtype,
            bool asked_to_be_enabled, std::optional<WeightCache> cache,
            const std::shared_ptr<const PolicyData>& asked_policy);

    at::DeviceType device;
    at::ScalarType dtype;
    bool enabled;
    PolicyNode policy;             // empty: the thread's stays
    std::uint64_t own_region = 0;  // of an outermost guard, if things are kept of weights; else 0
    std::shared_ptr<OpRuleUsage> op_rule_usage;  // null: no OpRule, or the outer region's
  };

  AutocastRegion(Checked checked, std::optional<bool> cache_enabled);

  DeviceAutocastState before_;
  bool cache_enabled_before_;
  bool dtype_changed_;
  std::uint64_t own_region_;
  Nesting nesting_;
  std::shared_ptr<OpRuleUsage> op_rule_usage_;
  int exceptions_ = std::uncaught_exceptions();
  PolicyScope policy_scope_;
};

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/overlay/autocast_region_impl.h"  // IWYU pragma: export
#endif
