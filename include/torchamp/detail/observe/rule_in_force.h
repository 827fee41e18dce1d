// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/kernel.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/overlay_table.h"
#include "torchamp/detail/policy/rule.h"

namespace torchamp::detail {

/// The overlay's rule for one call on the calling thread; native if there is none. `choice`: what
/// the overlay said of a rule that holds only sometimes; unset if the call did not come to it.
inline Cast overlay_rule(const std::string& name, at::DeviceType device,
                         std::optional<Cast> choice) {
  const std::size_t at = device_index(device, "CastRecorder");
  const PolicyData* policy = policy_in_force(at);
  if (policy == nullptr) return Cast::native;
  std::size_t index = 0;
  {
    SharedRuntime& runtime = shared_runtime();
    const std::scoped_lock lock(runtime.mutex);
    const auto overlay = runtime.overlays[at].find(name);
    if (overlay == runtime.overlays[at].end()) return Cast::native;
    index = overlay->second.index;
  }
  const OverlayTable::Entry rules = policy->rules_of_overlay(at, index);
  return rules.conditional == nullptr ? rules.cast : choice.value_or(Cast::unchanged);
}

/// The rule that a call of `op` has followed on the calling thread: never native unless LibTorch
/// has a kernel for it that casts in some other way than `promote`. `choice`: see overlay_rule().
inline Cast rule_of_call(const std::string& name, const c10::OperatorHandle& op,
                         at::DeviceType device, std::optional<Cast> choice) {
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) {
    return Cast::unchanged;
  }
  const Cast rule = overlay_rule(name, device, choice);
  if (rule != Cast::native) return rule;
  if (!has_native_kernel(op, device)) return Cast::unchanged;
  return kernel_rule(name, device) == Cast::promote ? Cast::promote : Cast::native;
}

}  // namespace torchamp::detail
