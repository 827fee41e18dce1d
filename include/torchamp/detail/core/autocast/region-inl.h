// SPDX-License-Identifier: BSD-3-Clause
// The three parts of a guard's work: resolve, push, restore.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "torchamp/autocast.h"
#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/core/autocast/policy_scope-inl.h"
#include "torchamp/detail/core/autocast/region.h"
#include "torchamp/detail/core/autocast/script_switch.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/products/cpu_products.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace TORCHAMP_NAMESPACE::detail {

// ---- What options come to -----------------------------------------------------------------------

inline void check_is_floating(at::ScalarType dtype) {
  TORCHAMP_CHECK(c10::isFloatingType(dtype), "AutocastGuard: the dtype ", c10::toString(dtype),
                 " is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
}

/// Warns once for each missing device, and once for each unsupported dtype.
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

/// The cache that the two options select together; unset: inherited. `cache_enabled = true` also
/// accepts torchamp's own cache.
inline std::optional<WeightCache> asked_cache(std::optional<bool> enabled,
                                              std::optional<WeightCache> cache,
                                              const ThreadPolicy* outer) {
  if (!cache) {
    if (enabled == false) return WeightCache::none;
    if (!enabled || !outer || outer->keep.until != WeightKeep::Until::not_kept) return std::nullopt;
    return WeightCache::libtorch;
  }
  TORCHAMP_CHECK_VALUE(!enabled || *enabled == (*cache != WeightCache::none),
                       *enabled ? "AutocastGuard: cache_enabled = true contradicts cache, which is "
                                  "WeightCache::none. Leave cache_enabled unset."
                                : "AutocastGuard: cache_enabled = false contradicts cache, which "
                                  "keeps casts. Leave cache_enabled unset.");
  const bool is_long = *cache == WeightCache::window || *cache == WeightCache::kept;
  TORCHAMP_CHECK(!is_long || cache->casts() != nullptr,
                 "AutocastGuard: WeightCache::window and WeightCache::kept need "
                 "torchamp/weight_cache.h. Include it in some source file.");
  return cache;
}

TORCHAMP_BODY void prepare_region(const char* call, const PolicyData& policy,
                                  const WeightCasts* weight_casts, std::size_t device_index,
                                  at::ScalarType dtype) {
  policy.compile_once(device_index);
  const at::DeviceType device = autocast_devices[device_index];
  if (device == at::kCPU && is_16_bit(dtype)) prepare_cpu_products(dtype);
  const OpRule* const rule = is_16_bit(dtype) ? policy.op_rule() : nullptr;
  if (rule != nullptr) rule->prepare(call, policy, device, dtype);
  if (weight_casts != nullptr) weight_casts->prepare(device);
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
  const WeightCasts* const inherited_casts = outer ? outer->weight_casts : nullptr;
  const RegionState inside{.autocast = autocast,
                           .around = around,
                           .outer = outer,
                           .device_index = index,
                           .policy = policy_of(options, guards, outer),
                           .keep_until = cache ? cache->until() : inherited_until,
                           .weight_casts = cache ? cache->casts() : inherited_casts,
                           .cache_enabled = cache_enabled};
  if (autocast.enabled) {
    prepare_region("AutocastGuard", *inside.policy, inside.weight_casts, index, autocast.dtype);
  }
  return inside;
}

// ---- A region -----------------------------------------------------------------------------------

/// Whether a region must push its policy although the outer policy is the same, because a
/// PolicyScope of this thread has other effects.
inline bool must_push_again(const RegionState& inside) {
  if (!inside.autocast.enabled) return false;
  // LibTorch has carried the policy to this thread, but not the JIT's switch, which a scope sets:
  // see Note [Who carries the policy to other threads].
  const bool has_no_scope_here = !ScriptSwitch::has_scope();
  // The policy is from outside of the backward pass for which the thread works, so the region's
  // additions would count as autograd's. A scope records the pass: see Note [Sums of gradients].
  const bool is_outside_backward = leaves_sums_alone(*inside.outer);
  return has_no_scope_here || is_outside_backward;
}

/// A new policy of the thread, for the region.
inline std::shared_ptr<const ThreadPolicy> policy_within(const RegionState& inside,
                                                         RegionListeners& listeners) {
  auto inner = copy_of(inside.outer);
  inner->inherited = inside.policy;
  inner->in_force[inside.device_index] = inside.autocast.enabled ? inside.policy : nullptr;
  inner->is_in_guard = true;
  inner->keep.until = inside.keep_until;
  inner->weight_casts = inside.weight_casts;
  listeners.begin(*inner, inside.op_rule());
  return inner;
}

/// Puts the region's policy into the thread's slot.
inline PolicyScope scope_of(const RegionState& inside, RegionListeners& listeners) {
  if (inside.outer != nullptr && inside.is_in(*inside.outer)) {
    return PolicyScope(must_push_again(inside) ? inside.outer->shared_from_this() : nullptr);
  }
  return PolicyScope(policy_within(inside, listeners));
}

TORCHAMP_BODY AutocastRegion::AutocastRegion(at::DeviceType device, const AutocastOptions& options)
    : AutocastRegion(resolve(device, options, thread_policy())) {}

// Members in the order of region.h: the listeners contribute to the policy that policy_scope_
// pushes.
TORCHAMP_BODY AutocastRegion::AutocastRegion(const RegionState& inside)
    : before_(inside.around),
      dtype_changes_(inside.changes_dtype()),
      policy_scope_(scope_of(inside, listeners_)) {
  push(inside);
}

TORCHAMP_BODY AutocastRegion::~AutocastRegion() {
  if (policy_scope_.end_of("~AutocastGuard")) restore();
}

TORCHAMP_BODY void AutocastRegion::push(const RegionState& inside) noexcept {
  inside.autocast.apply();
  if (inside.cache_enabled) {
    // Tensors that torchamp's cache does not store are cast each time: LibTorch's cache would not
    // detect their changes.
    set_cast_cache(*inside.cache_enabled &&
                   (inside.weight_casts == nullptr || inside.weight_casts->uses_libtorch_cache()));
  }
  const bool is_outermost = nesting_.enter() == 1;
  // See Note [Who clears LibTorch's cache of casts].
  if (dtype_changes_ && !is_outermost) at::autocast::clear_cache();
}

TORCHAMP_BODY void AutocastRegion::restore() noexcept {
  const bool was_outermost = nesting_.leave() == 0;
  if (was_outermost || dtype_changes_) at::autocast::clear_cache();
  before_.apply();
  set_cast_cache(cache_enabled_before_);
  // Last, because warnings run the program's code.
  nesting_.warn_of_order("~AutocastGuard");
  listeners_.end_op_rule();
}

}  // namespace TORCHAMP_NAMESPACE::detail
