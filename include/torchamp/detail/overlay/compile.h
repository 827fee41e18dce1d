// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/kernel.h"
#include "torchamp/detail/overlay/script_casts.h"
#include "torchamp/detail/policy/base_rules.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/overlay_table.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/policy.h"

namespace torchamp::detail {

/// Whether LibTorch's own kernel for the device is known to follow `cast`. Only the lists that the
/// devices share with CUDA can be read; a CPU's kernels cannot, so none is known to.
inline bool native_agrees(const c10::OperatorHandle& op, at::DeviceType device, Cast cast) {
  return device != at::kCPU && has_native_kernel(op, device) &&
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
  const bool is_edited = edited != nullptr && edited->cast.has_value();
  const Cast cast = rule_in_force(policy, op, device);
  if (cast == Cast::unchanged) {
    if (is_edited && needs_shield(op, device)) entry.cast = cast;
  } else if (cast != Cast::native && !native_agrees(op, device, cast)) {
    entry.cast = cast;
  }
  if (edited != nullptr && !edited->conditional.empty()) entry.conditional = &edited->conditional;
  return entry;
}

inline std::unique_ptr<BoxedKernel> make_overlay(const c10::OperatorHandle& op,
                                                 at::DeviceType device, std::size_t index,
                                                 std::optional<c10::SafeKernelFunction>&& native) {
  const bool promotes = promotes_its_arguments(op.operator_name());
  return std::unique_ptr<BoxedKernel>(new Overlay(op, index, device, promotes, std::move(native)));
}

/// Installs the overlays that `policy` needs on `device` and returns its table of them.
inline OverlayTable compile(const PolicyData& policy, at::DeviceType device) {
  install_script_cast_overlays(device);
  OverlayTable table;
  for (const auto& op : candidates(policy)) {
    const OverlayTable::Entry entry = overlay_entry(policy, op, device);
    if (entry.cast == Cast::native && entry.conditional == nullptr) continue;
    table.set(install_overlay(op, device, &make_overlay), entry);
  }
  return table;
}

/// Makes the policy ready for use on a device: see PolicyData::compile_once.
inline void compile_once(const PolicyData& policy, at::DeviceType device) {
  policy.compile_once(device_index(device, "Policy"), [&] { return compile(policy, device); });
}

}  // namespace torchamp::detail
