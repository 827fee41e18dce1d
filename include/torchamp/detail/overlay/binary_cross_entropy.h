// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Binary cross entropy]
// binary_cross_entropy takes probabilities, in general a sigmoid's. In 16 bits a sigmoid rounds to
// 1 from about 8.3 on in fp16 and 6.2 in bf16, and in fp16 to 0 below about -17: the loss of such
// an element is the constant 100 that LibTorch clamps the logarithm to, or 0, and its gradient is
// lost in the sigmoid, whatever the loss itself is computed in. That is why LibTorch's CUDA kernel
// for autocast refuses the op. The ban also stops programs that do it right, with a sigmoid in
// fp32, and that ran on a CPU, where there is none. So Policy::standard() computes the op in fp32
// on every device, and warns once of what the ban is for, which the dtype of the input alone tells:
// a 16-bit probability has been rounded already. Policy::torch() keeps the ban.

/// Whether the op is given probabilities.
inline bool takes_probabilities(const c10::OperatorName& op) {
  return op.name == "aten::binary_cross_entropy";
}

/// Warns once, from the dtype of the op's first argument. Reads no device.
inline void warn_of_16_bit_probabilities(const c10::OperatorHandle& op,
                                         const torch::jit::Stack& stack) {
  const c10::IValue& input = stack[stack.size() - op.schema().arguments().size()];
  if (!input.isTensor() || !input.toTensor().defined()) return;
  const at::ScalarType dtype = input.toTensor().scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) return;
  TORCH_WARN_ONCE(
      "torchamp: binary_cross_entropy was given probabilities in ", dtype,
      ". The loss is computed in fp32, but a sigmoid in 16 bits has already rounded those that are "
      "close to 0 or 1, whose gradients are then lost. Use binary_cross_entropy_with_logits, or "
      "compute the sigmoid in fp32 (torch::sigmoid(logits.to(torch::kFloat)), or "
      "Policy::fp32(\"sigmoid\")).");
}

}  // namespace torchamp::detail
