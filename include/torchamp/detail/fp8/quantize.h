// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/aminmax.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <tuple>

#include "torchamp/detail/fp8/formats.h"
#include "torchamp/detail/fp8/rows.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// A matrix in 8 bits (or in 4, as those e4m3 numbers that are e2m1 numbers). An element is its
/// code's value, times the scale of its block, times the scale of all.
struct Fp8Matrix {
  int64_t rows = 0, columns = 0;
  at::Tensor codes;
  at::Tensor inverse_scale;  // fp32, without dimensions; undefined: 1
  at::Tensor block_scales;   // a matrix of them; undefined: 1
  Fp8Block block = {};       // how large each is

  Fp8Matrix t() const {
    return {columns,
            rows,
            codes.t(),
            inverse_scale,
            block_scales.defined() ? block_scales.t() : block_scales,
            block.t()};
  }
};

/// The largest magnitude in `tensor` as fp32, without dimensions; NaN if there is one.
inline at::Tensor largest_magnitude(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return at::zeros({}, tensor.options().dtype(at::kFloat));
  const auto extremes = at::aminmax(tensor);
  return at::maximum(std::get<1>(extremes), std::get<0>(extremes).neg()).to(at::kFloat);
}

// Note [Scales of fp8]
// A scale is the largest power of two with largest magnitude * scale <= the format's largest
// number. So scaling rounds nothing and overflows nowhere, whatever a conversion does on overflow
// (LibTorch 2.15's saturates, 2.11's gives NaN), and the scale of a loss, a power of two as well,
// changes the scales and not the codes. An inf or NaN makes the scale NaN, and with it all that is
// computed from the matrix: a scaler then skips the step. (A conversion alone would make 448 of an
// inf.) Magnitudes below 2^-110 are scaled as that one and lose bits, so that scales, their
// inverses and what is decoded stay in the range of fp32. Nothing is read by the host, and nothing
// is kept.

/// The scales for what is of these largest magnitudes, in a format whose largest number is
/// `largest`: see Note [Scales of fp8].
inline at::Tensor scale_for(const at::Tensor& magnitude, double largest) {
  // As a CPU scalar it is an argument of the kernel, and not a copy to the device.
  at::Tensor scale = at::div(at::scalar_tensor(largest, at::kFloat), magnitude.clamp_min(0x1p-110));
  scale.view(at::kInt).bitwise_and_(0x7F800000);  // the power of two below
  return scale.add_(magnitude.mul(0));
}

/// `matrix`, in fp32 or a 16-bit dtype, in 8 bits at one scale.
inline Fp8Matrix quantize(const at::Tensor& matrix, at::ScalarType format) {
  const at::Tensor scale = scale_for(largest_magnitude(matrix), largest_of(format));
  // fp16 does not hold every scale. bf16 does, and so every product with one.
  const at::Tensor wide = matrix.scalar_type() == at::kHalf ? matrix.to(at::kFloat) : matrix;
  return {
      matrix.size(0), matrix.size(1), at::mul(wide, scale).to(format), scale.reciprocal(), {}, {}};
}

}  // namespace torchamp::detail
