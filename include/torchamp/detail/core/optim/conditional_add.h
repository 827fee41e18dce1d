// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_sgd.h>
#include <c10/core/DispatchKeySet.h>

#include <optional>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Whether the device of `tensor` has ATen's fused kernel `op`, such as "aten::_fused_sgd_", and
/// the kernel uses the scale and the flag (see optim.h).
inline bool has_fused_kernel(const char* op, const at::Tensor& tensor) {
  if (!facts_of(tensor.device().type()).fused) return false;
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(
      c10::highestPriorityBackendTypeId(tensor.key_set()));
}

// Note [A conditional add]
// ATen's fused SGD with a learning rate of 1, upwards and without momentum, adds "gradients" to
// "parameters" unless a flag on the device is 1: for all tensors in one launch, and without a read.
// With an op that makes 1 or 0 of the flag and one that adds it, a fused step and update take 10 %
// more instructions for 10 parameters on a CPU.

/// Whether add_unless() works on the device of `tensor`.
inline bool has_conditional_add(const at::Tensor& tensor) {
  return has_fused_kernel("aten::_fused_sgd_", tensor);
}

/// Adds each addend to its sum, unless `found_inf` is set and 1. All have the same device and
/// dtype.
inline void add_unless(const std::optional<at::Tensor>& found_inf, at::TensorList sums,
                       at::TensorList addends) {
  at::_fused_sgd_(sums, addends, {}, /*weight_decay=*/0., /*momentum=*/0., /*lr=*/1.,
                  /*dampening=*/0., /*nesterov=*/false, /*maximize=*/true,
                  /*is_first_step=*/false, /*grad_scale=*/std::nullopt, found_inf);
}

}  // namespace TORCHAMP_NAMESPACE::detail
