// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

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

}  // namespace torchamp::detail
