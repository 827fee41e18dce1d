// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/overlay/kernel.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/resolve.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/ops.h"

namespace torchamp::detail {

inline std::unique_ptr<BoxedKernel> make_overlay(const c10::OperatorHandle& op,
                                                 at::DeviceType device, std::size_t index,
                                                 const NativeKernel* native) {
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
  for (const auto& op : candidates(policy)) add(op, overlay_entry(policy, op, device));
  if (policy.op_rule() != nullptr) prepare_op_rules(policy, device, table);
  return table;
}

/// Makes the policy ready for use on a device: see PolicyData::compile_once.
inline void compile_once(const PolicyData& policy, at::DeviceType device) {
  policy.compile_once(device_index(device, "Policy"),
                      [&] { return compile_overlays(policy, device); });
}

/// Makes all ready for a region of a device: the policy, and who casts weights, if not LibTorch.
/// Error, of `call`: a strict fp8 rule that the region cannot follow.
inline void prepare_region(const char* call, const PolicyData& policy, const WeightCasts* casts,
                           at::DeviceType device, at::ScalarType dtype) {
  compile_once(policy, device);
  if (policy.op_rule() != nullptr && is_16_bit(dtype)) {
    const std::string why = policy.strict_refusal(device_index(device, call), device, dtype);
    TORCH_CHECK(why.empty(), call, ": the policy's fp8 rule is strict, and ", device,
                " cannot follow it in a region in ", dtype, ": ", why,
                ". Leave Fp8Options::strict out to run as lower_precision there.");
  }
  if (casts != nullptr) casts->prepare(device);
}

}  // namespace torchamp::detail
