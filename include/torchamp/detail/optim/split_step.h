// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/scalars.h"
#include "torchamp/detail/split_bits.h"

namespace torchamp::detail {

// Note [Steps of split weights]
// A kernel steps fp32 weights, so masters are put together, stepped and split, some elements at a
// time, in a buffer that all pieces share. A piece holds several small weights or a part of a large
// one. It ends where a weight does or at a multiple of split_piece_unit elements, so that ATen's
// kernels, which round the last few elements of a tensor otherwise than the rest, give the values
// that they would give whole masters.

/// Where a weight is cut: a multiple of what a kernel takes in one vector or one block.
inline constexpr int64_t split_piece_unit = 1 << 12;

/// A part of a list of split weights that is stepped at once.
class SplitPiece {
 public:
  SplitPiece(const StepList& list, at::Tensor buffer)
      : list_(list), buffer_(std::move(buffer)), runs_(list.device), piece_(part_of(list)) {}

  int64_t room() const { return buffer_.numel() - elements_; }
  bool empty() const { return elements_ == 0; }

  /// Adds `size` elements of the i-th weight, from `begin` on.
  void add(std::size_t i, int64_t begin, int64_t size) {
    const auto part = [&](const at::Tensor& tensor) {
      return in_memory_order(tensor).narrow(0, begin, size);
    };
    runs_.add(part(list_.params[i]), part(list_.low[i]));
    piece_.grads.push_back(part(list_.grads[i]));
    if (!list_.counters.empty()) piece_.counters.push_back(list_.counters[i]);
    for (std::size_t k = 0; k < list_.state.size(); ++k) {
      piece_.state[k].push_back(part(list_.state[k][i]));
    }
    elements_ += size;
  }

  /// Steps what was added, and is empty again.
  template <OptimizerKernel Kernel>
  void step(const typename Kernel::Options& options, const StepScalars& scalars) {
    piece_.params = runs_.join(buffer_);
    Kernel::step(options, piece_, scalars);
    runs_.split(buffer_, SplitNaNs::usual, scalars.found_inf());
    runs_ = SplitRuns(list_.device);
    piece_ = part_of(list_);
    elements_ = 0;
  }

 private:
  static StepList part_of(const StepList& list) {
    StepList part{static_cast<const StepKey&>(list)};
    part.dtype = at::kFloat;
    part.scalars = list.scalars;
    part.rate = list.rate;
    part.by_foreach = list.by_foreach;
    part.state.resize(list.state.size());
    return part;
  }

  const StepList& list_;
  at::Tensor buffer_;
  SplitRuns runs_;
  StepList piece_;
  int64_t elements_ = 0;
};

/// Kernel::step for a list of split weights.
template <OptimizerKernel Kernel>
void step_split(const typename Kernel::Options& options, const StepList& list,
                const StepScalars& scalars) {
  const bool is_skipped = list.device.is_cpu() && scalars.found_inf() &&
                          *scalars.found_inf()->template const_data_ptr<float>() == 1.F;
  if (is_skipped) return;
  int64_t elements = 0;
  for (const at::Tensor& param : list.params) elements += param.numel();
  elements = std::min(elements, split_elements_at_once(list.device));
  SplitPiece piece(list, at::empty({elements}, at::device(list.device).dtype(at::kFloat)));
  for (std::size_t i = 0; i < list.params.size(); ++i) {
    const int64_t size = list.params[i].numel();
    for (int64_t begin = 0; begin < size;) {
      int64_t part = std::min(size - begin, piece.room());
      if (part < size - begin) part -= part % split_piece_unit;
      if (part > 0) piece.add(i, begin, part);
      begin += part;
      if (begin < size || piece.room() == 0) piece.template step<Kernel>(options, scalars);
    }
  }
  if (!piece.empty()) piece.template step<Kernel>(options, scalars);
}

}  // namespace torchamp::detail
