// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/dropped_gradients.h"
#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/scalars.h"
#include "torchamp/detail/split_bits.h"

namespace torchamp::detail {

// Note [Steps of split weights]
// A kernel steps fp32 weights, so masters are put together, stepped and split, some elements at a
// time, in a buffer that all pieces share. A piece holds several small weights or a part of a large
// one. It ends where a weight does or at a multiple of piece_unit elements, so that ATen's
// kernels, which round the last few elements of a tensor otherwise than the rest, give the values
// that they would give whole masters.

/// A part of a list of split weights that is stepped at once.
class SplitPiece {
 public:
  SplitPiece(const StepList& list, at::Tensor buffer)
      : list_(list), buffer_(std::move(buffer)), runs_(list.device), piece_(part_of(list)) {}

  /// The gradients are dropped after the step.
  void drop_gradients(const StepScalars& scalars) {
    if (divides_apart(piece_, scalars)) division_.emplace(piece_, scalars, buffer_.numel());
  }

  int64_t room() const { return buffer_.numel() - elements_; }
  bool empty() const { return elements_ == 0; }

  /// Adds `size` elements of the i-th weight, from `begin` on.
  void add(std::size_t i, int64_t begin, int64_t size) {
    const auto part = [&](const at::Tensor& tensor) {
      return in_memory_order(tensor).narrow(0, begin, size);
    };
    runs_.add(part(list_.params[i]), part(list_.low[i]));
    piece_.add_beside_param(list_, i, part);
    elements_ += size;
  }

  /// Steps what was added, and is empty again.
  template <OptimizerKernel Kernel>
  void step(const typename Kernel::Options& options, const StepScalars& scalars) {
    piece_.params = runs_.join(buffer_);
    if (division_) {
      division_->step<Kernel>(options, piece_);
    } else {
      Kernel::step(options, piece_, scalars);
    }
    runs_.split(buffer_, SplitNaNs::usual, scalars.found_inf());
    runs_ = SplitRuns(list_.device);
    piece_ = part_of(list_);
    elements_ = 0;
  }

 private:
  static StepList part_of(const StepList& list) {
    StepList part = list.emptied();
    part.dtype = at::kFloat;
    return part;
  }

  const StepList& list_;
  at::Tensor buffer_;
  std::optional<ApartDivision> division_;
  SplitRuns runs_;
  StepList piece_;
  int64_t elements_ = 0;
};

/// Kernel::step for a list of split weights. `drops`: the gradients are dropped after the step.
template <OptimizerKernel Kernel>
void step_split(const typename Kernel::Options& options, const StepList& list,
                const StepScalars& scalars, bool drops) {
  if (is_known_skipped(scalars)) return;
  int64_t elements = 0, largest = 0;
  for (const at::Tensor& param : list.params) {
    elements += param.numel();
    largest = std::max(largest, param.numel());
  }
  elements = std::min(elements, split_elements_at_once(list.device));
  if (!may_step_parts<Kernel>) elements = std::max(elements, largest);
  SplitPiece piece(list, at::empty({elements}, at::device(list.device).dtype(at::kFloat)));
  if (drops) piece.drop_gradients(scalars);
  for (std::size_t i = 0; i < list.params.size(); ++i) {
    const int64_t size = list.params[i].numel();
    if (!may_step_parts<Kernel> && piece.room() < size) {
      piece.template step<Kernel>(options, scalars);
    }
    for (int64_t begin = 0; begin < size;) {
      int64_t part = std::min(size - begin, piece.room());
      if (part < size - begin) part -= part % piece_unit;
      if (part > 0) piece.add(i, begin, part);
      begin += part;
      if (begin < size || piece.room() == 0) piece.template step<Kernel>(options, scalars);
    }
  }
  if (!piece.empty()) piece.template step<Kernel>(options, scalars);
}

}  // namespace torchamp::detail
