// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/kernel.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/resolve.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/ops.h"

namespace torchamp::detail {

inline std::unique_ptr<BoxedKernel> make_overlay(const c10::OperatorHandle& op,
                                                 at::DeviceType device, std::size_t index,
                                                 const c10::SafeKernelFunction* native) {
  return std::unique_ptr<BoxedKernel>(new Overlay(op, index, device, native));
}

/// Asks whether the device can follow the policy's OpRules, and has overlays see the products that
/// are called instead.
inline void prepare_op_rules(const PolicyData& policy, at::DeviceType device, OverlayTable& table) {
  for (const Edit& edit : policy.edits) {
    table.refusals.push_back(edit.op_rule ? edit.op_rule->why_not_on(device) : std::string());
  }
  for (const OpFamily& family : products) {
    for (const std::string_view name : family) {
      for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
        if (why_not_castable(op.schema()).empty()) install_overlay(op, device, &make_overlay);
      }
    }
  }
}

/// The ops that LibTorch's own kernels for the device may cast to its 16-bit dtype.
inline std::vector<c10::OperatorHandle> natively_lowered(at::DeviceType device) {
  std::vector<c10::OperatorHandle> ops;
  const auto add = [&](std::string_view name) {
    for (auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) ops.push_back(op);
  };
  if (device == at::kCPU) {
    for (const std::string_view name : cpu_lower_precision_ops) add(name);
  } else {
    for (const ListedRule& rules : libtorch_cuda_lists()) add(rules.op);
    for (const std::string_view name : cuda_lower_precision_ops) add(name);
  }
  return ops;
}

/// overlay_entry(), with kept casts of weights where the op is lowered, by the policy or by
/// LibTorch's own kernel.
inline OverlayTable::Entry entry_keeping_casts(const PolicyData& policy,
                                               const c10::OperatorHandle& op,
                                               at::DeviceType device) {
  OverlayTable::Entry entry = overlay_entry(policy, op, device);
  const bool may_be_native = entry.cast == Cast::native && has_native_kernel(op, device) &&
                             why_not_castable(op.schema()).empty();
  if (entry.cast == Cast::lower_precision ||
      (may_be_native && effect_of_rule(policy, op, device) == Cast::lower_precision)) {
    entry.cast = lower_precision_kept;
  }
  return entry;
}

/// overlay_entry(), where masked_fill's rule of the standard table holds only sometimes: see
/// Note [What LibTorch refuses].
inline OverlayTable::Entry entry_as_made(const PolicyData& policy, const c10::OperatorHandle& op,
                                         OverlayTable::Entry entry) {
  const OverloadRules* const edited = policy.edited(op);
  const StandardRow* const row = standard_row(op.operator_name());
  if (row != nullptr && row->family == fill && entry.cast == Cast::fp32 &&
      (edited == nullptr || !edited->has_cast)) {
    entry.cast = fp32_where_it_must;
  }
  return entry;
}

/// Installs the overlays that `policy` needs on `device` and returns its table of them.
inline OverlayTable compile_overlays(const PolicyData& policy, at::DeviceType device) {
  install_script_cast_overlays(device);
  OverlayTable table;
  const auto add = [&](const c10::OperatorHandle& op, OverlayTable::Entry entry) {
    if (entry.cast == Cast::native && entry.conditional == nullptr) return;
    table.set(install_overlay(op, device, &make_overlay), entry_as_made(policy, op, entry));
  };
  const auto entry_of = policy.keeps_casts ? &entry_keeping_casts : &overlay_entry;
  if (policy.keeps_casts) {
    for (const auto& op : natively_lowered(device)) add(op, entry_of(policy, op, device));
  }
  for (const auto& op : candidates(policy)) add(op, entry_of(policy, op, device));
  if (policy.op_rule() != nullptr) prepare_op_rules(policy, device, table);
  return table;
}

/// Makes the policy ready for use on a device: see PolicyData::compile_once.
inline void compile_once(const PolicyData& policy, at::DeviceType device) {
  policy.compile_once(device_index(device, "Policy"),
                      [&] { return compile_overlays(policy, device); });
}

/// The policy as a ThreadPolicy puts it in force on a device, ready for use.
inline std::shared_ptr<const PolicyData> ready_policy(
    const std::shared_ptr<const PolicyData>& policy, at::DeviceType device, bool keeps_casts) {
  std::shared_ptr<const PolicyData> ready = keeps_casts ? policy->keeping_casts() : policy;
  compile_once(*ready, device);
  return ready;
}

}  // namespace torchamp::detail
