// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>

#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/text.h"

namespace torchamp::detail {

/// The rule of a base table for one overload, before any edit.
inline Cast base_rule(BaseTable base, const c10::OperatorHandle& op, at::DeviceType device) {
  if (base == BaseTable::torch) {
    return has_native_kernel(op, device) ? Cast::native : Cast::unchanged;
  }
  const bool castable = why_not_castable(op.schema()).empty();
  for (const StandardRow& row : standard_rows) {
    if (castable && row.is_for(device) && contains(row.family, op.operator_name())) {
      return row.cast;
    }
  }
  if (has_native_kernel(op, device)) return Cast::native;
  const Cast listed = listed_rule(full_name(op.operator_name()));
  return castable && listed != Cast::native ? listed : Cast::unchanged;
}

/// The rule in force for one overload, conditional rules left out.
inline Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op,
                          at::DeviceType device) {
  const OverloadRules* edited = policy.edited(op);
  if (edited == nullptr || !edited->has_cast) return base_rule(policy.base, op, device);
  return edited->cast == Cast::native ? base_rule(BaseTable::torch, op, device) : edited->cast;
}

/// What that rule does, where LibTorch's own kernel decides what this does; native if that is not
/// known.
inline Cast effect_of_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                           at::DeviceType device) {
  const Cast cast = rule_in_force(policy, op, device);
  return cast == Cast::native ? kernel_rule(full_name(op.operator_name()), device) : cast;
}

/// Whether LibTorch's own kernel for the device is known to follow `cast`. Only the lists that the
/// devices share with CUDA can be read; a CPU's kernels cannot, so none is known to.
inline bool native_agrees(const c10::OperatorHandle& op, at::DeviceType device, Cast cast) {
  return facts_of(device).lists == OpLists::cuda && has_native_kernel(op, device) &&
         listed_rule(full_name(op.operator_name())) == cast;
}

/// Whether an op must be shielded to stay unchanged: it has an autocast kernel, or calls ops that
/// may.
inline bool needs_shield(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// What the overlay of `op` has to do under `policy`; native if LibTorch alone does it.
inline OverlayTable::Entry overlay_entry(const PolicyData& policy, const c10::OperatorHandle& op,
                                         at::DeviceType device) {
  OverlayTable::Entry entry;
  const OverloadRules* edited = policy.edited(op);
  const bool is_edited = edited != nullptr && edited->has_cast;
  const Cast cast = rule_in_force(policy, op, device);
  if (cast == Cast::unchanged) {
    if (is_edited && needs_shield(op, device)) entry.cast = cast;
  } else if (cast != Cast::native && !native_agrees(op, device, cast)) {
    entry.cast = cast;
    if (cast == Cast::fp8) entry.fp8 = &policy.edits[edited->edit].fp8;
  }
  if (edited != nullptr && !edited->conditional.empty()) entry.conditional = &edited->conditional;
  return entry;
}

/// The castable ops that a base table speaks of itself, LibTorch's kernels aside.
inline std::vector<c10::OperatorHandle> base_candidates(BaseTable base) {
  std::vector<c10::OperatorHandle> candidates;
  if (base == BaseTable::torch) return candidates;
  const auto add = [&](std::string_view name) {
    for (auto& op : find_ops(name, "Policy::standard", /*missing_ok=*/true)) {
      if (why_not_castable(op.schema()).empty()) candidates.push_back(op);
    }
  };
  for (const StandardRow& row : standard_rows) {
    for (const std::string_view name : row.family) add(name);
  }
  for (const OverloadRules& rules : libtorch_cuda_lists()) add(rules.op);
  return candidates;
}

/// The ops that a policy speaks of, LibTorch's kernels aside. Some come more than once.
inline std::vector<c10::OperatorHandle> candidates(const PolicyData& policy) {
  std::vector<c10::OperatorHandle> ops = base_candidates(policy.base);
  for (const OverloadRules& rules : policy.rules) {
    for (auto& op : find_ops(rules.op, "Policy", /*missing_ok=*/true)) ops.push_back(op);
  }
  return ops;
}

}  // namespace torchamp::detail
