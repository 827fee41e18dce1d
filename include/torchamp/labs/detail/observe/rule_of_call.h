// SPDX-License-Identifier: BSD-3-Clause
// The rule of an op's call, for diagnoses.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>

#include <optional>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/rule.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The rule of a call of `op` on the calling thread. It is native only if LibTorch's kernel casts
/// in another way than `promote`. `choice`: the kernel's report for a conditional rule; unset if
/// there was no report.
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
    const CompiledRule compiled = compiled_rule(*policy, op, device);
    const Cast cast =
        compiled.depends_on_call() ? choice.value_or(Cast::unchanged) : compiled.rule.cast;
    if (cast != Cast::native) return cast;
  }
  if (!has_native_kernel(op, device)) return Cast::unchanged;
  const Cast effect = effect_of_native(op.operator_name(), device);
  return effect == Cast::promote ? effect : Cast::native;
}

}  // namespace TORCHAMP_NAMESPACE::detail
