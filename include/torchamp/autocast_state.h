// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. AutocastState: a thread's autocast state, to copy to other threads.

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <memory>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/autocast/policy_scope.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {
/// While it lives, casts of the calling thread bypass LibTorch's cache of cast weights, which all
/// threads share. Guards do not switch the cache on.
class NoCastCache {
 public:
  NoCastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
    ++no_cast_caches;
  }
  NoCastCache(const NoCastCache&) = delete;
  NoCastCache& operator=(const NoCastCache&) = delete;
  ~NoCastCache() {
    --no_cast_caches;
    at::autocast::set_autocast_cache_enabled(before_);
  }

 private:
  bool before_;
};
}  // namespace detail

/// The autocast state of a thread: for each device type whether autocast is on and its dtype, the
/// weight cache's flag, and the policy. A value, to copy to other threads:
///
///     const auto state = torchamp::AutocastState::of_this_thread();
///     std::thread worker([state] {
///       torchamp::AutocastStateGuard same(state);
///       replica->forward(batch);
///     });
///
/// LibTorch's own at::ThreadLocalState carries all of this except the cache flag, and carries more,
/// such as the grad mode. Code that uses at::ThreadLocalState does not need this class. Never
/// synchronises.
class AutocastState {
 public:
  /// Takes a copy of the calling thread's state.
  static AutocastState of_this_thread() {
    AutocastState state;
    for (std::size_t i = 0; i < detail::device_count; ++i) {
      state.devices_[i] = detail::DeviceAutocastState::of(detail::autocast_devices[i]);
    }
    state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
    const auto* policy = detail::thread_policy();
    if (policy != nullptr && policy->inherited) {
      state.policy_ = policy->outside ? policy->outside : policy->shared_from_this();
    }
    return state;
  }

  /// Whether autocast was on for this type of device. Error: a device type without autocast.
  bool is_enabled(at::DeviceType device) const { return at(device).enabled; }
  /// The dtype that ops were cast to on this type of device. Error: a device type without autocast.
  at::ScalarType dtype(at::DeviceType device) const { return at(device).dtype; }
  /// Whether autocast was on for the type of `device`.
  bool is_enabled(at::Device device) const { return is_enabled(device.type()); }
  /// The dtype that ops were cast to on the type of `device`.
  at::ScalarType dtype(at::Device device) const { return dtype(device.type()); }
  /// Whether LibTorch's cache of casts was on.
  bool is_cache_enabled() const { return cache_enabled_; }

  /// Whether all parts are equal. Two policies are equal if they come from the same guard.
  bool operator==(const AutocastState&) const = default;

 private:
  friend class AutocastStateGuard;

  AutocastState() = default;

  const detail::DeviceAutocastState& at(at::DeviceType device) const {
    return devices_[detail::device_index(device, "AutocastState")];
  }

  std::array<detail::DeviceAutocastState, detail::device_count> devices_{};
  bool cache_enabled_ = true;
  std::shared_ptr<const detail::ThreadPolicy> policy_;
};

/// A region of the calling thread under a captured AutocastState. Destruction restores the previous
/// state. The end of the outermost region drops the cached casts of weights, as with an
/// AutocastGuard. If another thread destroys the guard, the guard warns and leaves all state
/// unchanged.
class AutocastStateGuard {
 public:
  /// Sets `state` on the calling thread.
  [[nodiscard]] explicit AutocastStateGuard(const AutocastState& state)
      : before_(AutocastState::of_this_thread()), policy_scope_(changed_policy(before_, state)) {
    apply(state);
    (void)nesting_.enter();
  }

  AutocastStateGuard(const AutocastStateGuard&) = delete;
  AutocastStateGuard(AutocastStateGuard&&) = delete;
  AutocastStateGuard& operator=(const AutocastStateGuard&) = delete;
  AutocastStateGuard& operator=(AutocastStateGuard&&) = delete;
  static void* operator new(std::size_t) = delete;
  static void* operator new[](std::size_t) = delete;

  ~AutocastStateGuard() {
    if (!policy_scope_.end_of("~AutocastStateGuard")) return;
    if (nesting_.leave() == 0) at::autocast::clear_cache();
    apply(before_);
    nesting_.warn_of_order("~AutocastStateGuard");
  }

 private:
  /// The policy to set; null if it is set already. Exception: in a backward pass a policy that is
  /// set already gets a new scope, see Note [Sums of gradients].
  static std::shared_ptr<const detail::ThreadPolicy> changed_policy(const AutocastState& before,
                                                                    const AutocastState& state) {
    if (state.policy_ == before.policy_ &&
        (!state.policy_ || !detail::leaves_sums_alone(*detail::thread_policy()))) {
      return nullptr;
    }
    return state.policy_ ? state.policy_ : std::make_shared<const detail::ThreadPolicy>();
  }

  static void apply(const AutocastState& state) {
    bool dtypes_change = false;
    for (const auto& device : state.devices_) {
      const auto now = detail::DeviceAutocastState::of(device.device);
      if (now == device) continue;
      dtypes_change = dtypes_change || now.dtype != device.dtype;
      device.apply();
    }
    detail::set_cast_cache(state.cache_enabled_);
    // LibTorch's cache does not distinguish the 16-bit dtypes.
    if (dtypes_change) at::autocast::clear_cache();
  }

  AutocastState before_;
  detail::Nesting nesting_;
  detail::PolicyScope policy_scope_;
};

}  // namespace TORCHAMP_NAMESPACE
