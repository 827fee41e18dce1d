// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/scalars.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [Steps by pieces]
// Some weights are stepped piece by piece, in buffers that stay in a CPU's cache: split weights,
// whose masters are put together first, and those whose gradients are divided apart. A piece holds
// several small weights or a part of a large one. It ends where a weight does or at a multiple of
// piece_unit elements, so that ATen's kernels, which round the last few elements of a tensor
// otherwise than the rest, give the values that they would give whole weights.

/// Where a parameter is cut: a multiple of what a kernel takes in one vector or one block.
inline constexpr int64_t piece_unit = 1 << 12;

/// The buffers of a step. Lists of one kind, which are stepped one after the other, share one.
class PieceBuffers {
 public:
  void want(const TensorKind& kind, int64_t elements) {
    int64_t& most = group_of(buffers_, kind).elements;
    most = std::max(most, elements);
  }

  /// Takes all memory that is wanted.
  void allocate() {
    for (Buffer& buffer : buffers_) {
      buffer.memory = at::empty({buffer.elements}, at::device(buffer.device).dtype(buffer.dtype));
    }
  }

  at::Tensor get(const TensorKind& kind, int64_t elements) {
    return group_of(buffers_, kind).memory.narrow(0, 0, elements);
  }

 private:
  struct Buffer : TensorKind {
    int64_t elements = 0;
    at::Tensor memory{};
  };
  std::vector<Buffer> buffers_;
};

/// The buffers of a step, for masters and for gradients that are divided apart.
struct StepBuffers {
  PieceBuffers masters{}, gradients{};
};

/// Adds the i-th weight, of `size` elements, to a piece, which is stepped whenever it is full. A
/// Piece has room(), add(i, begin, size), and step(), which empties it.
template <class Piece>
void add_by_parts(Piece& piece, std::size_t i, int64_t size) {
  for (int64_t begin = 0; begin < size;) {
    int64_t part = std::min(size - begin, piece.room());
    if (part < size - begin) part -= part % piece_unit;
    if (part > 0) piece.add(i, begin, part);
    begin += part;
    if (begin < size || piece.room() == 0) piece.step();
  }
}

// Note [Gradients that are dropped]
// ATen's fused kernels write the gradients that they divide: of an Adam's 32 bytes read and written
// for an fp32 parameter, 4. Where the optimizer drops its gradients after the step, nobody would
// read those. So on a CPU, a large gradient is divided piece by piece into a buffer that stays in
// the cache, and the kernel steps with that: see Note [Steps by pieces]. Small gradients are in the
// cache anyway, 16-bit ones are not rounded when a kernel divides them itself, and on a GPU the
// launches would cost more than the bytes.

/// The least elements of a gradient that is divided apart, and the most of a piece.
inline constexpr int64_t divided_at_once = 1 << 18;

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
  /// The size of the buffer for pieces of at most `elements`: the last number is the scale.
  static int64_t buffer_size(int64_t elements) { return elements + 1; }

  /// `buffer` is of the list's dtype.
  ApartDivision(const StepScalars& scalars, at::Tensor buffer)
      : unscaled_(scalars.without_scale()),
        buffer_(std::move(buffer)),
        scale_(buffer_.select(0, buffer_.numel() - 1)) {
    scale_.copy_(*scalars.grad_scale());
  }

  /// `kernel` for `piece`, whose tensors are flat and whose gradients are replaced.
  void step(const KernelStep& kernel, StepList& piece) const {
    int64_t begin = 0;
    for (at::Tensor& gradient : piece.grads) {
      at::Tensor divided = buffer_.narrow(0, begin, gradient.numel());
      at::div_out(divided, gradient, scale_);
      begin += gradient.numel();
      gradient = std::move(divided);
    }
    kernel(piece, unscaled_);
  }

 private:
  StepScalars unscaled_;
  at::Tensor buffer_, scale_;
};

/// A part of a list that is stepped at once, with its gradients divided apart.
class DividedPiece {
 public:
  DividedPiece(const KernelStep& kernel, const StepList& list, const StepScalars& scalars,
               const at::Tensor& buffer)
      : kernel_(kernel), list_(list), division_(scalars, buffer), piece_(list.emptied()) {}

  int64_t room() const { return divided_at_once - elements_; }
  bool empty() const { return elements_ == 0; }

  /// Adds `size` elements of the i-th parameter, from `begin` on.
  void add(std::size_t i, int64_t begin, int64_t size) {
    piece_.add(list_, i, [&](const at::Tensor& tensor) {
      return in_memory_order(tensor).narrow(0, begin, size);
    });
    elements_ += size;
  }

  /// Steps what was added, and is empty again.
  void step() {
    division_.step(kernel_, piece_);
    piece_ = list_.emptied();
    elements_ = 0;
  }

 private:
  const KernelStep& kernel_;
  const StepList& list_;
  ApartDivision division_;
  StepList piece_;
  int64_t elements_ = 0;
};

inline bool is_divided_apart(const at::Tensor& param) {
  return param.numel() >= divided_at_once;
}

/// Whether gradients of `list`, which are dropped after the step, are divided by pieces.
inline bool divides_by_pieces(const StepList& list, const StepScalars& scalars, bool takes_parts) {
  return takes_parts && divides_apart(list, scalars) &&
         std::ranges::any_of(list.params, is_divided_apart);
}

/// What step_and_drop wants of `buffers`.
inline void want_dropped(PieceBuffers& buffers, const StepList& list, const StepScalars& scalars,
                         bool takes_parts) {
  if (divides_by_pieces(list, scalars, takes_parts)) {
    buffers.want(list, ApartDivision::buffer_size(divided_at_once));
  }
}

/// `kernel` for a list whose gradients are dropped after the step: may leave them scaled.
inline void step_and_drop(const KernelStep& kernel, const StepList& list,
                          const StepScalars& scalars, PieceBuffers& buffers) {
  if (!divides_by_pieces(list, scalars, kernel.takes_parts)) return kernel(list, scalars);
  if (is_known_skipped(scalars)) return;

  DividedPiece piece(kernel, list, scalars,
                     buffers.get(list, ApartDivision::buffer_size(divided_at_once)));
  StepList small = list.emptied();
  for (std::size_t i = 0; i < list.params.size(); ++i) {
    if (is_divided_apart(list.params[i])) {
      add_by_parts(piece, i, list.params[i].numel());
    } else {
      small.add(list, i, [](const at::Tensor& tensor) { return tensor; });
    }
  }
  if (!piece.empty()) piece.step();
  if (!small.params.empty()) kernel(small, scalars);
}

}  // namespace torchamp::detail
