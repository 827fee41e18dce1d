// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/step_list.h"

namespace torchamp::detail {

// Note [Gradients that are dropped]
// ATen's fused kernels write the gradients that they divide: of an Adam's 32 bytes read and written
// for an fp32 parameter, 4. Where the optimizer drops its gradients after the step, nobody would
// read those. So on a CPU, a large gradient is divided piece by piece into a buffer that stays in
// the cache, and the kernel steps with that. Small gradients are in the cache anyway, 16-bit ones
// are not rounded when a kernel divides them itself, and on a GPU the launches would cost more than
// the bytes.

/// The least elements of a gradient that is divided apart, and the most of a piece: many times what
/// a kernel takes at once, so that it rounds a piece as it would the whole.
inline constexpr int64_t divided_at_once = 1 << 18;

/// Whether gradients of `list`, which is stepped in `dtype`, are divided apart from the step.
/// `drops`: they are dropped after it.
inline bool divides_apart(const StepList& list, at::ScalarType dtype, bool drops) {
  return drops && list.device.is_cpu() && !list.lacks_op && list.scalars->grad_scale() &&
         (dtype == at::kFloat || dtype == at::kDouble);
}

/// `kernel` for `piece`, whose tensors are flat; its gradients are divided in `buffer` before. That
/// has one number more, for the scale in their dtype, as to cast it would take memory.
inline void step_divided(KernelStep kernel, StepList& piece, const at::Tensor& buffer) {
  const at::Tensor scale = buffer.select(0, -1);
  scale.copy_(*piece.scalars->grad_scale());
  int64_t begin = 0;
  for (at::Tensor& gradient : piece.grads) {
    at::Tensor divided = part_of(buffer, begin, gradient.numel());
    at::div_out(divided, gradient, scale);
    begin += gradient.numel();
    gradient = std::move(divided);
  }
  kernel(piece, piece.scalars->without_scale());
}

/// What step_and_drop() is to find as list.buffer; undefined where no gradient is divided apart.
inline at::Tensor buffer_to_drop(const StepList& list, bool drops) {
  const auto is_large = [](const at::Tensor& param) { return param.numel() >= divided_at_once; };
  const bool divides = list.takes_parts && divides_apart(list, list.dtype, drops) &&
                       std::any_of(list.params.begin(), list.params.end(), is_large);
  return divides ? list.scalars->buffer(list.dtype, divided_at_once + 1) : at::Tensor();
}

/// `kernel` for a list whose gradients are dropped after the step: leaves large ones scaled.
inline void step_and_drop(KernelStep kernel, const StepList& list) {
  StepList small = list.emptied();
  for (std::size_t i = 0; i < list.params.size(); ++i) {
    const at::Tensor& param = list.params[i];
    const int64_t size = param.numel();
    if (size < divided_at_once) {
      small.params.push_back(param);
      small.add_beside_param(list, i, [](const at::Tensor& tensor) { return tensor; });
      continue;
    }
    for (int64_t begin = 0; begin < size; begin += divided_at_once) {
      StepList piece = list.emptied();
      const auto part = [&](const at::Tensor& tensor) {
        return part_of(tensor, begin, std::min(divided_at_once, size - begin));
      };
      piece.params.push_back(part(param));
      piece.add_beside_param(list, i, part);
      step_divided(kernel, piece, list.buffer);
    }
  }
  if (!small.params.empty()) kernel(small, *list.scalars);
}

}  // namespace torchamp::detail
