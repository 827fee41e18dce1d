// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/scalars.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [Gradients that are dropped]
// ATen's fused kernels write the gradients that they divide: of an Adam's 32 bytes read and written
// for an fp32 parameter, 4. Where the optimizer drops its gradients after the step, nobody would
// read those. So on a CPU, a large gradient is divided piece by piece into a buffer that stays in
// the cache, and the kernel steps with that. Pieces end where ATen's kernels round as they would in
// the middle of a tensor (see Note [Steps of split weights]). Small gradients are in the cache
// anyway, 16-bit ones are not rounded when a kernel divides them itself, and on a GPU the launches
// would cost more than the bytes.

/// Where a parameter is cut: a multiple of what a kernel takes in one vector or one block.
inline constexpr int64_t piece_unit = 1 << 12;

/// The least elements of a gradient that is divided by pieces, and the most of a piece.
inline constexpr int64_t divided_at_once = 1 << 18;

/// The next multiple of `unit`, unless `size` is one.
inline int64_t rounded_up(int64_t size, int64_t unit) {
  return (size + unit - 1) / unit * unit;
}

/// Whether a step with `scalars` is not taken, as far as the host knows without asking a device.
inline bool is_known_skipped(const StepScalars& scalars) {
  const auto& found_inf = scalars.found_inf();
  return found_inf && found_inf->is_cpu() && *found_inf->const_data_ptr<float>() == 1.F;
}

/// Whether gradients of `list` are divided apart from the step, if they are dropped after it.
inline bool divides_apart(const StepList& list, const StepScalars& scalars) {
  return list.device.is_cpu() && !list.by_foreach && scalars.grad_scale() &&
         (list.dtype == at::kFloat || list.dtype == at::kDouble);
}

/// Steps pieces of a list, with the gradients divided in a buffer beforehand.
class ApartDivision {
 public:
  /// For pieces of at most `elements`.
  ApartDivision(const StepList& list, const StepScalars& scalars, int64_t elements)
      : scale_(*scalars.grad_scale()),
        unscaled_(scalars.without_scale()),
        buffer_(at::empty({elements}, at::device(list.device).dtype(list.dtype))) {}

  /// Kernel::step for `piece`, whose tensors are flat and whose gradients are replaced.
  template <OptimizerKernel Kernel>
  void step(const typename Kernel::Options& options, StepList& piece) const {
    int64_t begin = 0;
    for (at::Tensor& gradient : piece.grads) {
      at::Tensor divided = buffer_.narrow(0, begin, gradient.numel());
      at::div_out(divided, gradient, scale_);
      begin += gradient.numel();
      gradient = std::move(divided);
    }
    Kernel::step(options, piece, unscaled_);
  }

 private:
  at::Tensor scale_;
  StepScalars unscaled_;
  at::Tensor buffer_;
};

/// Kernel::step for a list whose gradients are dropped after the step: may leave them scaled.
template <OptimizerKernel Kernel>
void step_and_drop(const typename Kernel::Options& options, const StepList& list,
                   const StepScalars& scalars) {
  const auto is_large = [](const at::Tensor& param) { return param.numel() >= divided_at_once; };
  const bool apart = may_step_parts<Kernel> && divides_apart(list, scalars) &&
                     std::ranges::any_of(list.params, is_large);
  if (!apart) return Kernel::step(options, list, scalars);
  if (is_known_skipped(scalars)) return;

  const ApartDivision division(list, scalars, divided_at_once);
  StepList small = list.emptied();
  for (std::size_t i = 0; i < list.params.size(); ++i) {
    if (!is_large(list.params[i])) {
      small.add(list, i, [](const at::Tensor& tensor) { return tensor; });
      continue;
    }
    const int64_t size = list.params[i].numel();
    const int64_t pieces = rounded_up(size, divided_at_once) / divided_at_once;
    const int64_t most = rounded_up(rounded_up(size, pieces) / pieces, piece_unit);
    for (int64_t begin = 0; begin < size; begin += most) {
      StepList piece = list.emptied();
      piece.add(list, i, [&](const at::Tensor& tensor) {
        return in_memory_order(tensor).narrow(0, begin, std::min(most, size - begin));
      });
      division.step<Kernel>(options, piece);
    }
  }
  if (!small.params.empty()) Kernel::step(options, small, scalars);
}

}  // namespace torchamp::detail
