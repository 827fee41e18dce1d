// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/policy/special_ops.h"
#include "torchamp/detail/text.h"

namespace torchamp::detail {

/// An op on a device, and what rules depend on, each looked up once at most.
class OpOnDevice {
 public:
  OpOnDevice(const c10::OperatorHandle& op, at::DeviceType device) : op_(op), device_(device) {}

  const c10::OperatorHandle& op() const { return op_; }
  at::DeviceType device() const { return device_; }

  /// "aten::add.Tensor".
  const std::string& name() {
    if (name_.empty()) name_ = full_name(op_.operator_name());
    return name_;
  }
  /// Whether its arguments can be cast.
  bool is_castable() {
    if (!is_castable_) is_castable_ = why_not_castable(op_.schema()).empty();
    return *is_castable_;
  }
  /// Whether LibTorch itself has a kernel for it.
  bool has_native() {
    if (!has_native_) has_native_ = has_native_kernel(op_, device_);
    return *has_native_;
  }

 private:
  const c10::OperatorHandle& op_;
  at::DeviceType device_;
  std::string name_;
  std::optional<bool> is_castable_, has_native_;
};

/// The rule of a base table for one overload, before any edit; may be fp32_where_lacking.
inline Cast base_rule(BaseTable base, OpOnDevice& op) {
  if (base == BaseTable::torch) return op.has_native() ? Cast::native : Cast::unchanged;
  const StandardRow* const row = standard_row(op.op().operator_name());
  if (row != nullptr && (row->writes || op.is_castable()) &&
      !(row->unless_native && op.has_native())) {
    return row->cast_for(op.device());
  }
  if (op.has_native()) return Cast::native;
  const Cast listed = listed_rule(op.name());
  return listed != Cast::native && op.is_castable() ? listed : Cast::unchanged;
}

/// The rule in force for one overload, conditional rules left out. `edited`: what the policy's
/// edits made of it, or null. May be fp32_where_lacking.
inline Cast rule_in_force(const PolicyData& policy, const OverloadRules* edited, OpOnDevice& op) {
  if (edited == nullptr || !edited->has_cast) return base_rule(policy.base, op);
  return edited->cast == Cast::native ? base_rule(BaseTable::torch, op) : edited->cast;
}
/// The same in regions of the dtype that the calling thread has for the device.
inline Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op,
                          at::DeviceType device) {
  OpOnDevice on_device(op, device);
  const Cast cast = rule_in_force(policy, policy.edited(op), on_device);
  if (cast != fp32_where_lacking) return cast;
  return has_recurrent_layers(device, at::autocast::get_autocast_dtype(device))
             ? base_rule(BaseTable::torch, on_device)
             : Cast::fp32;
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
inline bool native_agrees(OpOnDevice& op, Cast cast) {
  return facts_of(op.device()).lists == OpLists::cuda && op.has_native() &&
         listed_rule(op.name()) == cast;
}

/// Whether an op must be shielded to stay unchanged: it has an autocast kernel, or calls ops that
/// may.
inline bool needs_shield(OpOnDevice& op) {
  return op.has_native() ||
         op.op().hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// What the overlay of `op` has to do under `policy`; native if LibTorch alone does it.
inline OverlayTable::Entry overlay_entry(const PolicyData& policy, const c10::OperatorHandle& op,
                                         at::DeviceType device) {
  OpOnDevice on_device(op, device);
  OverlayTable::Entry entry;
  const OverloadRules* edited = policy.edited(op);
  const bool is_shield = edited != nullptr && edited->has_cast && edited->cast == Cast::unchanged;
  const Cast cast = rule_in_force(policy, edited, on_device);
  if (cast == Cast::unchanged) {
    if (is_shield && needs_shield(on_device)) entry.cast = cast;
  } else if (cast != Cast::native && !native_agrees(on_device, cast)) {
    entry.cast = cast;
    if (cast == Cast::fp8) entry.edit = &policy.edits[edited->edit];
  }
  if (edited != nullptr && !edited->conditional.empty()) {
    entry.conditional = &edited->conditional;
  } else if (cast == fp32_where_lacking) {
    static const auto& no_edits = *new std::vector<std::size_t>;  // never destroyed
    entry.conditional = &no_edits;
  }
  return entry;
}

/// The ops that a base table speaks of itself, LibTorch's kernels aside.
inline std::vector<c10::OperatorHandle> base_candidates(BaseTable base) {
  std::vector<c10::OperatorHandle> candidates;
  if (base == BaseTable::torch) return candidates;
  const auto add = [&](std::string_view name, bool writes) {
    for (auto& op : find_ops(name, "Policy::standard", /*missing_ok=*/true)) {
      if (writes || why_not_castable(op.schema()).empty()) candidates.push_back(op);
    }
  };
  for (const StandardRow& row : standard_rows) {
    for (const std::string_view name : row.family) add(name, row.writes);
  }
  for (const ListedRule& rules : libtorch_cuda_lists()) add(rules.op, false);
  return candidates;
}

/// The ops that a policy speaks of, LibTorch's kernels aside. Some come more than once.
inline std::vector<c10::OperatorHandle> candidates(const PolicyData& policy) {
  std::vector<c10::OperatorHandle> ops = base_candidates(policy.base);
  for (const auto& [name, rules] : policy.rules) {
    for (auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) ops.push_back(op);
  }
  return ops;
}

}  // namespace torchamp::detail
