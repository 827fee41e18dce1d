// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <cstddef>
#include <memory>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/fp8/rule.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/weights/derived.h"

namespace torchamp::detail {

struct GuardTrial;

/// What a guard puts into the thread's slot. Immutable: LibTorch shares it with other threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard that names no policy
  /// By device, with its table compiled; null outside guards and where they are disabled.
  std::array<std::shared_ptr<const PolicyData>, device_count> in_force;
  /// How long what is derived from weights is kept. Its region is never 0 inside a guard.
  WeightKeep keep;
  std::shared_ptr<Fp8Usage> fp8;  // of the innermost region whose policy has an fp8 rule
  /// Whether casts are kept so as well, and not by LibTorch.
  bool keeps_casts = false;
  std::shared_ptr<const GuardTrial> trial;  // of a PrecisionAudit; null otherwise
};

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

/// The policy in force on the calling thread for a device, by its index; null outside
/// guards and where they are disabled.
inline const PolicyData* policy_in_force(std::size_t device_index) {
  const ThreadPolicy* policy = thread_policy();
  return policy == nullptr ? nullptr : policy->in_force[device_index].get();
}

}  // namespace torchamp::detail
