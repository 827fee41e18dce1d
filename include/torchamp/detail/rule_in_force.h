// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceType.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>

#include "torchamp/cast.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/libtorch_lists.h"
#include "torchamp/detail/op_catalog.h"
#include "torchamp/detail/overlay.h"
#include "torchamp/detail/policy_data.h"
#include "torchamp/detail/shared_runtime.h"
#include "torchamp/detail/thread_policy.h"

namespace torchamp::detail {

/// The ops that LibTorch's CPU kernels promote. They are not in its headers, as CUDA's are.
inline constexpr std::array<std::string_view, 4> cpu_promote_list{
    "aten::cat", "aten::stack", "aten::index_copy", "aten::index_copy.dimname"};

/// The overlay's rule for one call on the calling thread; native if there is none.
inline Cast overlay_rule(const std::string& name, const c10::OperatorHandle& op,
                         at::DeviceType device, c10::ArrayRef<const c10::IValue> inputs) {
  const std::size_t at = device_index(device, "CastRecorder");
  const PolicyData* policy = policy_in_force(at);
  if (policy == nullptr) return Cast::native;
  std::size_t index = 0;
  {
    SharedRuntime& runtime = shared_runtime();
    const std::scoped_lock lock(runtime.mutex);
    index = runtime.overlays[at].index_of(name);
    if (index == runtime.overlays[at].ops.size()) return Cast::native;
  }
  return policy->rule(at, index, device, op, inputs);
}

/// The rule that a call of `op` follows on the calling thread: never native unless LibTorch has a
/// kernel for it that casts in some other way than `promote`.
inline Cast rule_of_call(const std::string& name, const c10::OperatorHandle& op,
                         at::DeviceType device, c10::ArrayRef<const c10::IValue> inputs) {
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) {
    return Cast::unchanged;
  }
  const Cast rule = overlay_rule(name, op, device, inputs);
  if (rule != Cast::native) return rule;
  if (!has_native_kernel(op, device)) return Cast::unchanged;
  if (device == at::kCPU) {
    return std::find(cpu_promote_list.begin(), cpu_promote_list.end(), name) !=
                   cpu_promote_list.end()
               ? Cast::promote
               : Cast::native;
  }
  return listed_rule(name) == Cast::promote ? Cast::promote : Cast::native;
}

}  // namespace torchamp::detail
