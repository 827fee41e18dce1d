// SPDX-License-Identifier: BSD-3-Clause
// What a guard does: resolve, push, restore.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "torchamp/autocast.h"
#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/core/autocast/region.h"
#include "torchamp/detail/core/autocast/script_switch.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace torchamp::detail {

// ---- What options come to -----------------------------------------------------------------------

inline void check_is_floating(at::ScalarType dtype) {
  TORCHAMP_CHECK(c10::isFloatingType(dtype), "AutocastGuard: the dtype ", c10::toString(dtype),
                 " is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
}

/// Warns once for each device that is not there, and for each dtype.
inline void warn_of_unusable(at::DeviceType device, at::ScalarType dtype, bool is_present) {
  static std::atomic<bool> devices[c10::COMPILE_TIME_MAX_DEVICE_TYPES],
      dtypes[static_cast<std::size_t>(at::ScalarType::NumOptions)];
  const std::string name = c10::DeviceTypeName(device, /*lower_case=*/is_present);
  if (is_present) {
    warn_once(
        dtypes[static_cast<std::size_t>(dtype)],
        {"AutocastGuard: autocast on ", name, " supports fp16 and bf16, not ", c10::toString(dtype),
         ". The region runs with autocast disabled. Pass torch::kBFloat16 or torch::kHalf",
         ", or {.enabled = false} to leave fp32 alone."});
  } else {
    warn_once(devices[static_cast<std::size_t>(device)],
              {"AutocastGuard: there is no ", name, " device. ", name,
               " regions run with autocast disabled. Pass torch::kCPU for a CPU."});
  }
}

/// Whether regions of `device` run in `dtype`; warns if not.
inline bool is_usable(at::DeviceType device, at::ScalarType dtype) {
  const bool is_present = device_is_present(device);
  if (is_present) check_is_floating(dtype);
  const bool runs =
      is_present && (is_16_bit(dtype) || (dtype == at::kFloat && facts_of(device).fp32_regions));
  if (!runs) warn_of_unusable(device, dtype, is_present);
  return runs;
}

/// What the two options say together; unset: as it is around the region. `cache_enabled = true`
/// leaves a cache of torchamp's.
inline std::optional<WeightCache> asked_cache(std::optional<bool> enabled,
                                              std::optional<WeightCache> cache,
                                              const ThreadPolicy* outer) {
  if (!cache) {
    if (enabled == false) return WeightCache::none;
    if (!enabled || !outer || outer->keep.until != WeightKeep::Until::made) return std::nullopt;
    return WeightCache::libtorch;
  }
  TORCHAMP_CHECK_VALUE(!enabled || *enabled == (*cache != WeightCache::none),
                       *enabled ? "AutocastGuard: cache_enabled = true contradicts cache, which is "
                                  "WeightCache::none. Leave cache_enabled unset."
                                : "AutocastGuard: cache_enabled = false contradicts cache, which "
                                  "keeps casts. Leave cache_enabled unset.");
  return cache;
}

TORCHAMP_BODY void prepare_region(const char* call, const PolicyData& policy,
                                  const WeightCasts* casts, at::DeviceType device,
                                  at::ScalarType dtype) {
  policy.compile_once(device);
  const OpRule* const rule = is_16_bit(dtype) ? policy.op_rule() : nullptr;
  if (rule != nullptr) rule->prepare(call, policy, device, dtype);
  if (casts != nullptr) casts->prepare(device);
}

/// The policy of a guard with these options.
inline const std::shared_ptr<const PolicyData>& policy_of(const AutocastOptions& options,
                                                          const GuardOverride& guards,
                                                          const ThreadPolicy* outer) {
  if (guards.policy) return guards.policy;
  if (options.policy) return options.policy->data();
  return outer && outer->inherited ? outer->inherited : unedited(BaseTable::standard);
}

TORCHAMP_BODY RegionState resolve(at::DeviceType device, const AutocastOptions& options,
                                  const ThreadPolicy* outer) {
  const auto cache = asked_cache(options.cache_enabled, options.cache, outer);
  const std::size_t index = device_index(device, "AutocastGuard");
  if (options.dtype) check_is_floating(*options.dtype);
  const GuardOverride& guards = guard_override(outer);
  const auto around = DeviceAutocastState::of(device);
  DeviceAutocastState autocast = around;
  autocast.dtype =
      guards.dtype_of_guard(device, options.dtype.value_or(around.dtype), options.enabled);
  autocast.enabled = options.enabled && !guards.off && is_usable(device, autocast.dtype);

  std::optional<bool> cache_enabled = options.cache_enabled;
  if (!cache_enabled && options.cache) cache_enabled = *options.cache != WeightCache::none;
  const auto inherited_until =
      outer && outer->is_in_guard ? outer->keep.until : WeightKeep::Until::region_ends;
  const WeightCasts* const inherited_casts = outer ? outer->casts : nullptr;
  const RegionState inside{.autocast = autocast,
                           .around = around,
                           .device_index = index,
                           .policy = policy_of(options, guards, outer),
                           .keep_until = cache ? cache->until() : inherited_until,
                           .casts = cache ? cache->casts() : inherited_casts,
                           .cache_enabled = cache_enabled};
  if (autocast.enabled) {
    prepare_region("AutocastGuard", *inside.policy, inside.casts, device, autocast.dtype);
  }
  return inside;
}

// ---- A region -----------------------------------------------------------------------------------

/// What the thread's slot is to hold within a region; nothing if it may stay as it is.
inline PolicyInSlot policy_to_push(const RegionState& inside, const ThreadPolicy* outer,
                                   RegionListeners& listeners) {
  const bool is_enabled = inside.autocast.enabled;
  if (outer != nullptr && inside.is_in(*outer)) {
    // Taken over, it does not hold for scripts yet: see Note [Derivatives of scripts]. In backward
    // it does not hold for sums: see Note [Sums of gradients].
    const bool holds = !is_enabled || (ScriptSwitch::has_scope() && !leaves_sums_alone(*outer));
    return {holds ? nullptr : outer->shared_from_this()};
  }
  const OpRule* const rule = inside.op_rule();
  if (is_enabled && !rule && !kept_weights() && !c10::ThreadLocalDebugInfo::current() &&
      this_backward_pass() == ThreadPolicy::no_backward_pass) {
    PolicyInSlot spare =
        SparePolicy::take([&](const auto& policy) { return inside.is_in(policy); });
    if (spare.policy != nullptr) return spare;
  }
  auto inner = copy_of(outer);
  inner->inherited = inside.policy;
  inner->in_force[inside.device_index] = is_enabled ? inside.policy : nullptr;
  inner->is_in_guard = true;
  inner->keep.until = inside.keep_until;
  inner->casts = inside.casts;
  listeners.begin(*inner, rule);
  return {std::move(inner)};
}

TORCHAMP_BODY AutocastRegion::AutocastRegion(at::DeviceType device,
                                             const AutocastOptions& options) {
  const ThreadPolicy* const outer = thread_policy();
  push(resolve(device, options, outer), outer);
}

TORCHAMP_BODY AutocastRegion::~AutocastRegion() {
  if (policy_scope_->end_of("~AutocastGuard")) restore();
}

TORCHAMP_BODY void AutocastRegion::push(const RegionState& inside, const ThreadPolicy* outer) {
  policy_scope_.emplace(policy_to_push(inside, outer, listeners_));
  before_ = inside.around;
  inside.autocast.apply();
  if (inside.cache_enabled) {
    // What torchamp's cache does not take is cast anew: LibTorch's would not see that it changes.
    set_cast_cache(*inside.cache_enabled && inside.casts == nullptr);
  }
  dtype_changed_ = inside.autocast.dtype != before_.dtype;
  // See Note [Who clears LibTorch's cache of casts].
  if (nesting_.enter() > 1 && dtype_changed_) at::autocast::clear_cache();
}

TORCHAMP_BODY void AutocastRegion::restore() {
  if (nesting_.leave("~AutocastGuard") == 0 || dtype_changed_) at::autocast::clear_cache();
  listeners_.end_kept_region();
  before_.apply();
  at::autocast::set_autocast_cache_enabled(cache_enabled_before_);
  listeners_.end_op_rule();
}

}  // namespace torchamp::detail
