// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>

#include <optional>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/ops.h"

namespace torchamp::detail {

/// The rule that a call of `op` has followed on the calling thread: never native unless LibTorch
/// has a kernel for it that casts in some other way than `promote`. `choice`: what the overlay said
/// of a rule that holds only sometimes; unset if the call did not come to it.
inline Cast rule_of_call(const c10::OperatorHandle& op, at::DeviceType device,
                         std::optional<Cast> choice) {
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) {
    return Cast::unchanged;
  }
  const ThreadPolicy* const of_thread = thread_policy();
  const PolicyData* const policy =
      of_thread == nullptr ? nullptr
                           : of_thread->in_force[device_index(device, "CastRecorder")].get();
  const bool is_autograds =
      policy != nullptr && adds_gradients(op.operator_name()) && leaves_sums_alone(*of_thread);
  if (policy != nullptr && !is_autograds) {
    const OverlayEntry rules = overlay_entry(*policy, TabledOp(op), device);
    if (rules.conditional != nullptr) {
      const Cast rule = choice.value_or(Cast::unchanged);
      if (rule != Cast::native) return rule;
    } else if (rules.cast != Cast::native) {
      return rules.cast == fp32_where_it_must ? Cast::fp32 : rules.cast;
    }
  }
  if (!has_native_kernel(op, device)) return Cast::unchanged;
  const Cast effect = kernel_rule(op.operator_name(), device);
  return effect == Cast::promote ? effect : Cast::native;
}

}  // namespace torchamp::detail
