// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/autocast_region.h"
#include "torchamp/detail/overlay/compile.h"
#include "torchamp/detail/overlay/environment.h"
#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/script_switch.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Whether a warning about the `number`th of at most 64 cases is due: the first time, or always
/// where the program asked LibTorch for that.
inline bool warning_is_due(std::atomic<std::uint64_t>& warned_of, unsigned number) {
  const std::uint64_t bit = std::uint64_t{1} << number;
  return (warned_of.fetch_or(bit) & bit) == 0 || c10::WarningUtils::get_warnAlways();
}

inline void check_is_floating(at::ScalarType dtype) {
  TORCH_CHECK(c10::isFloatingType(dtype), "AutocastGuard: the dtype ", dtype,
              " is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
}

/// Whether `device` runs autocast in `dtype`; warns once for each dtype if not. Not a floating
/// dtype: an error.
inline bool dtype_is_usable(at::DeviceType device, at::ScalarType dtype) {
  check_is_floating(dtype);
  if (is_16_bit(dtype) || (dtype == at::kFloat && facts_of(device).fp32_regions)) return true;

  static std::atomic<std::uint64_t> warned_of = 0;
  if (warning_is_due(warned_of, static_cast<unsigned>(dtype))) {
    TORCH_WARN("AutocastGuard: autocast on ", device, " supports fp16 and bf16, not ", dtype,
               ". The region runs with autocast disabled. Pass torch::kBFloat16 or torch::kHalf, "
               "or {.enabled = false} to leave fp32 alone.");
  }
  return false;
}

/// Whether regions of `device` can run; warns once for each type of device if not.
inline bool device_is_usable(at::DeviceType device) {
  if (device_is_present(device)) return true;
  static std::atomic<std::uint64_t> warned_of = 0;
  if (warning_is_due(warned_of, static_cast<unsigned>(device))) {
    const std::string name = c10::DeviceTypeName(device);
    TORCH_WARN("AutocastGuard: there is no ", name, " device. ", name,
               " regions run with autocast disabled. Pass torch::kCPU for a CPU.");
  }
  return false;
}

/// What the two options say together; unset: as it is on the calling thread. `cache_enabled = true`
/// leaves a cache of torchamp's.
inline std::optional<WeightCache> asked_cache(std::optional<bool> enabled,
                                              std::optional<WeightCache> cache) {
  if (!cache) {
    if (enabled == false) return WeightCache::none;
    const ThreadPolicy* const outer = thread_policy();
    if (!enabled || !outer || outer->keep.until != WeightKeep::Until::made) return std::nullopt;
    return WeightCache::libtorch;
  }
  TORCH_CHECK_VALUE(!enabled || *enabled == (*cache != WeightCache::none),
                    "AutocastGuard: cache_enabled = ", *enabled ? "true" : "false",
                    " contradicts cache, which ", *enabled ? "is WeightCache::none" : "keeps casts",
                    ". Leave cache_enabled unset.");
  return cache;
}

/// The number of an outermost guard's region, by which things are kept of weights; 0 if none are.
inline std::uint64_t begin_region() {
  KeptWeights* const kept = kept_weights();
  return kept == nullptr ? 0 : kept->begin_region();
}

TORCHAMP_BODY AutocastRegion::Checked::Checked(
    at::DeviceType on_device, std::optional<at::ScalarType> asked_dtype, bool asked_to_be_enabled,
    std::optional<WeightCache> cache, const std::shared_ptr<const PolicyData>& asked_policy)
    : device(on_device) {
  const std::size_t index = device_index(device, "AutocastGuard");
  if (asked_dtype) check_is_floating(*asked_dtype);
  dtype = asked_dtype.value_or(at::autocast::get_autocast_dtype(device));
  const ThreadPolicy* const outer = thread_policy();
  const GuardOverride& guards = guard_override(outer);
  dtype = guards.dtype_of_guard(device, dtype, asked_to_be_enabled);
  enabled = asked_to_be_enabled && !guards.off && device_is_usable(device) &&
            dtype_is_usable(device, dtype);

  const auto& data = guards.policy               ? guards.policy
                     : asked_policy              ? asked_policy
                     : outer && outer->inherited ? outer->inherited
                                                 : unedited(BaseTable::standard);
  const bool is_inner = outer && outer->is_in_guard;
  const WeightKeep::Until until = cache      ? cache->until()
                                  : is_inner ? outer->keep.until
                                             : WeightKeep::Until::region_ends;
  const WeightCasts* const casts = cache ? cache->casts() : outer ? outer->casts : nullptr;
  std::shared_ptr<const PolicyData> in_force;
  if (enabled) {
    prepare_region("AutocastGuard", *data, casts, device, dtype);
    in_force = data;
  }
  const OpRule* const rule = enabled && is_16_bit(dtype) ? in_force->op_rule() : nullptr;
  if (outer && outer->inherited == data && outer->in_force[index] == in_force &&
      outer->keep.until == until && outer->casts == casts) {
    // Taken over, it does not hold for scripts yet: see Note [Derivatives of scripts]. In backward
    // it does not hold for sums: see Note [Sums of gradients].
    if (enabled && (!ScriptSwitch::has_scope() || leaves_sums_alone(*outer))) {
      policy.policy = outer->shared_from_this();
    }
    return;
  }
  // A spare node has nothing below it: it would hide what others, a profiler say, have put there.
  const bool is_below_all = c10::ThreadLocalDebugInfo::current() == nullptr;
  const bool in_backward = this_backward_pass() != ThreadPolicy::no_backward_pass;
  const ThreadPolicy* const spare =
      !is_below_all || !in_force || rule || in_backward ? nullptr : SparePolicy::look();
  if (spare && spare->in_force[index] == in_force && spare->inherited == data &&
      spare->keep.until == until && spare->casts == casts) {
    own_region = begin_region();
    policy = SparePolicy::take(own_region);
    return;
  }
  auto inner = copy_of(outer);
  if (inner->keep.region == 0) inner->keep.region = own_region = begin_region();
  inner->is_in_guard = true;
  inner->keep.until = until;
  inner->casts = casts;
  inner->in_force[index] = std::move(in_force);
  if (rule != nullptr) {
    op_rule_usage = inner->op_rule_usage = rule->make_usage(inner->op_rule_usage);
  }
  inner->inherited = data;
  policy.policy = std::move(inner);
}

TORCHAMP_BODY AutocastRegion::AutocastRegion(at::DeviceType device,
                                             std::optional<at::ScalarType> dtype, bool enabled,
                                             std::optional<bool> cache_enabled,
                                             std::optional<WeightCache> cache,
                                             const std::shared_ptr<const PolicyData>& policy)
    : AutocastRegion(Checked(device, dtype, enabled, asked_cache(cache_enabled, cache), policy),
                     cache_enabled || !cache ? cache_enabled : cache != WeightCache::none) {}

TORCHAMP_BODY AutocastRegion::AutocastRegion(Checked checked, std::optional<bool> cache_enabled)
    : before_(DeviceAutocastState::of(checked.device)),
      cache_enabled_before_(at::autocast::is_autocast_cache_enabled()),
      dtype_changed_(before_.dtype != checked.dtype),
      own_region_(checked.own_region),
      op_rule_usage_(std::move(checked.op_rule_usage)),
      policy_scope_(std::move(checked.policy)) {
  at::autocast::set_autocast_enabled(checked.device, checked.enabled);
  at::autocast::set_autocast_dtype(checked.device, checked.dtype);
  if (cache_enabled) {
    // What torchamp's cache does not take is cast anew: LibTorch's would not see that it changes.
    const ThreadPolicy* const policy = thread_policy();
    NoCastCache::set_flag(*cache_enabled && (policy == nullptr || policy->casts == nullptr));
  }
  // LibTorch's cache does not tell one 16-bit dtype from the other.
  if (nesting_.enter() > 1 && dtype_changed_) at::autocast::clear_cache();
}

TORCHAMP_BODY AutocastRegion::~AutocastRegion() {
  if (!policy_scope_.end_of("~AutocastGuard")) return;
  if (nesting_.leave() == 0 || dtype_changed_) at::autocast::clear_cache();
  if (own_region_ != 0) kept_weights()->end_region(own_region_);
  before_.apply();
  at::autocast::set_autocast_cache_enabled(cache_enabled_before_);
  if (op_rule_usage_ != nullptr && std::uncaught_exceptions() == exceptions_) {
    op_rule_usage_->warn_if_unused();
  }
}

}  // namespace torchamp::detail
