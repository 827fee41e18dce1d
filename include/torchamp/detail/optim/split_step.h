// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "torchamp/detail/optim/dropped_gradients.h"
#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/pieces.h"
#include "torchamp/detail/optim/scalars.h"
#include "torchamp/detail/split_bits.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// A part of a list of split weights that is stepped at once: kernels step fp32 weights, so masters
/// are put together, stepped and split.
template <OptimizerKernel Kernel>
class SplitPiece {
 public:
  using Options = typename Kernel::Options;

  /// `buffer`: for the masters.
  SplitPiece(const Options& options, const StepList& list, const StepScalars& scalars,
             at::Tensor buffer)
      : options_(options),
        list_(list),
        scalars_(scalars),
        buffer_(std::move(buffer)),
        runs_(list.device),
        piece_(part_of(list)) {}

  /// Divides gradients, which are dropped after the step, in `buffer`.
  void divide_apart(at::Tensor buffer) { division_.emplace(scalars_, std::move(buffer)); }

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
  void step() {
    piece_.params = runs_.join(buffer_);
    if (division_) {
      division_->template step<Kernel>(options_, piece_);
    } else {
      Kernel::step(options_, piece_, scalars_);
    }
    runs_.split(buffer_, SplitNaNs::usual, scalars_.found_inf());
    runs_ = SplitRuns(list_.device);
    piece_ = part_of(list_);
    elements_ = 0;
  }

  /// The list of what an empty piece steps.
  static StepList part_of(const StepList& list) {
    StepList part = list.emptied();
    part.dtype = at::kFloat;
    return part;
  }

 private:
  const Options& options_;
  const StepList& list_;
  const StepScalars& scalars_;
  at::Tensor buffer_;
  std::optional<ApartDivision> division_;
  SplitRuns runs_;
  StepList piece_;
  int64_t elements_ = 0;
};

/// How many elements a piece of `list` has at most.
template <OptimizerKernel Kernel>
int64_t split_piece_elements(const StepList& list) {
  int64_t elements = 0, largest = 0;
  for (const at::Tensor& param : list.params) {
    elements += param.numel();
    largest = std::max(largest, param.numel());
  }
  elements = std::min(elements, split_elements_at_once(list.device));
  return may_step_parts<Kernel> ? elements : std::max(elements, largest);
}

/// The buffers of a step, for masters and for gradients that are divided apart.
struct StepBuffers {
  PieceBuffers masters{}, gradients{};
};

/// What step_split wants of `buffers`.
template <OptimizerKernel Kernel>
void want_split(StepBuffers& buffers, const StepList& list, const StepScalars& scalars,
                bool drops) {
  const TensorKind wide{list.device, at::kFloat};
  const int64_t elements = split_piece_elements<Kernel>(list);
  buffers.masters.want(wide, elements);
  if (drops && divides_apart(SplitPiece<Kernel>::part_of(list), scalars)) {
    buffers.gradients.want(wide, ApartDivision::buffer_size(elements));
  }
}

/// Kernel::step for a list of split weights. `drops`: the gradients are dropped after the step.
template <OptimizerKernel Kernel>
void step_split(const typename Kernel::Options& options, const StepList& list,
                const StepScalars& scalars, bool drops, StepBuffers& buffers) {
  if (is_known_skipped(scalars)) return;
  const TensorKind wide{list.device, at::kFloat};
  const int64_t elements = split_piece_elements<Kernel>(list);
  SplitPiece<Kernel> piece(options, list, scalars, buffers.masters.get(wide, elements));
  if (drops && divides_apart(SplitPiece<Kernel>::part_of(list), scalars)) {
    piece.divide_apart(buffers.gradients.get(wide, ApartDivision::buffer_size(elements)));
  }
  for (std::size_t i = 0; i < list.params.size(); ++i) {
    const int64_t size = list.params[i].numel();
    if (!may_step_parts<Kernel> && piece.room() < size) piece.step();
    add_by_parts(piece, i, size);
  }
  if (!piece.empty()) piece.step();
}

}  // namespace torchamp::detail
