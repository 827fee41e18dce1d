// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/copysign.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "torchamp/detail/fp8/quantize.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// How large the blocks of one scale are. No columns: whole rows.
struct Fp8Block {
  int64_t rows, columns;
};

/// With zeros behind rows and columns, up to whole blocks.
template <class Tensor>
Tensor padded_to(const Tensor& matrix, Fp8Block block) {
  const int64_t rows = (block.rows - matrix.size(0) % block.rows) % block.rows;
  const int64_t columns = (block.columns - matrix.size(1) % block.columns) % block.columns;
  if (rows == 0 && columns == 0) return matrix;
  return at::constant_pad_nd(matrix, {0, columns, 0, rows});
}

/// A view with dimensions [row of blocks, row in it, column of blocks, column in it].
template <class Tensor>
Tensor in_blocks(const Tensor& padded, Fp8Block block) {
  return padded.unflatten(1, {padded.size(1) / block.columns, block.columns})
      .unflatten(0, {padded.size(0) / block.rows, block.rows});
}

/// Scales of blocks beside in_blocks().
template <class Tensor>
Tensor beside_blocks(const Tensor& scales) {
  return scales.unsqueeze(1).unsqueeze(3);
}

/// In e4m3 with a power of two for each block: see Note [Scales of fp8]. Those of 1 x 32 are what
/// e8m0 numbers hold.
template <class Tensor>
Fp8Matrix<Tensor> quantize_blocks(const Tensor& matrix, Fp8Block block) {
  if (matrix.numel() == 0) return quantize(matrix, at::kFloat8_e4m3fn);
  if (block.columns == 0) block.columns = matrix.size(1);
  const Tensor padded = padded_to(matrix, block);
  const Tensor blocks = in_blocks(padded, block);
  const Tensor scales =
      scale_for(blocks.abs().amax({1, 3}).to(at::kFloat), largest_of(at::kFloat8_e4m3fn));
  // bf16 holds every scale, and every product with one.
  const bool narrow = matrix.scalar_type() == at::kBFloat16;
  const Tensor scaled = at::mul(blocks, beside_blocks(narrow ? scales.to(at::kBFloat16) : scales));
  return {matrix.size(0), matrix.size(1), scaled.to(at::kFloat8_e4m3fn).reshape(padded.sizes()),
          Tensor(), scales.reciprocal()};
}

/// Numbers up to 6 as e2m1 has them: multiples of 0.5 below 2, of 1 below 4, of 2 above. To the
/// nearest, of two to that with the even code; or to either neighbour at random, nearer ones more
/// often, so that the mean is right.
template <class Tensor>
Tensor rounded_to_e2m1(const Tensor& numbers, bool stochastic) {
  const Tensor magnitude = numbers.abs();
  const Tensor step = at::where(
      magnitude < 2, at::full_like(magnitude, 0.5),
      at::where(magnitude < 4, at::full_like(magnitude, 1.), at::full_like(magnitude, 2.)));
  const Tensor steps = magnitude / step;
  const Tensor whole = stochastic ? (steps + at::rand_like(steps)).floor() : steps.round();
  return at::copysign(whole * step, numbers);
}

/// In e2m1 with an e4m3 scale for each block and a power of two for all.
template <class Tensor>
Fp8Matrix<Tensor> quantize_nvfp4(const Tensor& matrix, Fp8Block block, bool stochastic) {
  if (matrix.numel() == 0) return quantize(matrix, at::kFloat8_e4m3fn);
  constexpr double largest = 6;
  const Tensor scale =
      scale_for(largest_magnitude(matrix), largest * largest_of(at::kFloat8_e4m3fn));
  const Tensor padded = padded_to(matrix.to(at::kFloat).mul(scale), block);
  const Tensor blocks = in_blocks(padded, block);
  // Where it would be 0 it is the smallest that e4m3 has.
  const Tensor block_scales =
      (blocks.abs().amax({1, 3}) / largest).clamp_min(0x1p-9).to(at::kFloat8_e4m3fn);
  const Tensor numbers = (blocks / beside_blocks(block_scales.to(at::kFloat)))
                             .clamp(-largest, largest);  // the block's scale was rounded
  const Tensor codes = rounded_to_e2m1(numbers, stochastic).to(at::kFloat8_e4m3fn);
  return {matrix.size(0), matrix.size(1), codes.reshape(padded.sizes()), scale.reciprocal(),
          block_scales};
}

// Note [The Hadamard transform]
// A few large elements in a block of 16 leave no codes for the others. So both factors of a
// weight's gradient are multiplied, 16 by 16 along the contraction, by an orthogonal matrix, which
// spreads such elements over the block and drops out of the product: (G H)(H' X) = G X. Its entries
// are 1/4 or -1/4, so it is exact where the sums are. The signs are TransformerEngine's.

/// `matrix` after the transform of its rows, with zeros behind its columns up to whole blocks.
template <class Tensor>
Tensor hadamard_transformed(const Tensor& matrix) {
  static const struct Transform {
    Transform() {
      constexpr int signs[] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
      for (unsigned row = 0; row < 16; ++row) {
        for (unsigned column = 0; column < 16; ++column) {
          const bool odd = __builtin_parity(row & column) != 0;
          entries[row * 16 + column] = 0.25F * static_cast<float>(odd ? -signs[row] : signs[row]);
        }
      }
    }
    float entries[256];
  } transform;
  const Tensor padded = padded_to(matrix.to(at::kFloat), {1, 16});
  const Tensor by = at::from_blob(const_cast<float*>(transform.entries), {16, 16}, at::kFloat);
  return at::matmul(padded.unflatten(1, {padded.size(1) / 16, 16}), by).flatten(1);
}

}  // namespace torchamp::detail
