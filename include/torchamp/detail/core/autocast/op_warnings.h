// SPDX-License-Identifier: BSD-3-Clause
// Warnings about some ops, by LibTorch and by torchamp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

#include <atomic>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A part of LibTorch's warning that the weights of a recurrent layer are scattered: see
/// Note [Recurrent layers].
inline constexpr const char* scattered_weights = "not part of single contiguous chunk";

// Note [Binary cross entropy]
// binary_cross_entropy takes probabilities, in general a sigmoid's. In 16 bits a sigmoid rounds to
// 1 from about 8.3 on in fp16 and 6.2 in bf16, and in fp16 to 0 below about -17. The gradient of
// such an element is lost in the sigmoid, even if the loss is computed in fp32. Therefore
// LibTorch's CUDA kernel for autocast rejects the op, even if the sigmoid is in fp32; on a CPU
// LibTorch allows it. Policy::standard() computes the op in fp32 on every device, and warns once if
// its input is in 16 bits, because the input is then already rounded. Policy::torch() rejects the
// op like LibTorch.

/// Warns once, from the dtype of the op's first argument. Reads no device.
inline void warn_of_16_bit_probabilities(const c10::OperatorHandle& op,
                                         const torch::jit::Stack& stack) {
  const c10::IValue& input = stack[stack.size() - op.schema().arguments().size()];
  if (!input.isTensor() || !input.toTensor().defined()) return;
  const at::ScalarType dtype = input.toTensor().scalar_type();
  if (!is_16_bit(dtype)) return;
  static std::atomic<bool> is_known = false;
  warn_once(
      is_known,
      {"torchamp: binary_cross_entropy was given probabilities in ", c10::toString(dtype),
       ". The loss is computed in fp32, but a sigmoid in 16 bits has already rounded probabilities "
       "close to 0 or 1, so their gradients are lost. Use binary_cross_entropy_with_logits, "
       "or compute the sigmoid in fp32 (torch::sigmoid(logits.to(torch::kFloat)), or "
       "Policy::fp32(\"sigmoid\"))."});
}

}  // namespace TORCHAMP_NAMESPACE::detail
