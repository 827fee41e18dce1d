// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/aminmax.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

#include "torchamp/labs/detail/fp8/formats.h"
#include "torchamp/labs/detail/fp8/rows.h"
#include "torchamp/labs/fp8_options.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A matrix in 8 bits (or in 4, as the e4m3 numbers that e2m1 has). An element is its code's value,
/// times the scale of its block, times the scale of the tensor.
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

// Note [Passes over an operand]
// On a device each op reads its operands from memory, so the number of ops is the cost. A form
// takes two passes: one finds the largest magnitude, one scales and rounds (LibTorch's mul converts
// to the dtype of its result). A tensorwise form is used in both products; the second needs a
// transposed copy of the codes. Products take rows along the contraction, so rowwise forms are
// written in this layout at once. The other ops work on scales only, and stay on the device.

/// The largest magnitude of a tensor on a device, or of each row, in fp32; NaN if there is one.
inline at::Tensor norm_of_largest(const at::Tensor& tensor, at::OptionalIntArrayRef dim) {
  return at::linalg_vector_norm(tensor, std::numeric_limits<double>::infinity(), dim,
                                /*keepdim=*/dim.has_value(), at::kFloat);
}

/// The largest magnitude in `tensor` as 0-dim fp32; NaN if there is one.
inline at::Tensor largest_magnitude(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return at::zeros({}, tensor.options().dtype(at::kFloat));
  if (!tensor.is_cpu()) return norm_of_largest(tensor, {});
  const auto extremes = at::aminmax(tensor);  // a CPU's norm takes ten times as long
  return at::maximum(std::get<1>(extremes), std::get<0>(extremes).neg()).to(at::kFloat);
}

// Note [Scales of fp8]
// A scale is the largest power of two with largest magnitude * scale <= the format's largest
// number. So scaling neither rounds nor overflows, and it does not matter that conversions differ
// on overflow (in LibTorch 2.15 they saturate, in 2.11 they give NaN). A loss scale, which is also
// a power of two, changes the scales but not the codes. An inf or NaN makes the scale NaN, and
// thereby all results: a scaler then skips the step. (A conversion alone would turn an inf into
// 448.) Magnitudes below 2^-110 are scaled as 2^-110 and lose bits, so scales, their inverses and
// decoded values stay in fp32's range. The host reads nothing, and nothing is kept.

/// The scales for these largest magnitudes, in a format with the largest number `largest`: see
/// Note [Scales of fp8].
inline at::Tensor scale_for(const at::Tensor& magnitude, double largest) {
  // As a CPU scalar it is a kernel argument, not a copy to the device.
  at::Tensor scale = at::div(at::scalar_tensor(largest, at::kFloat), magnitude.clamp_min(0x1p-110));
  scale.view(at::kInt).bitwise_and_(0x7F800000);  // the power of two below
  return scale.add_(magnitude, /*alpha=*/0);
}

/// `matrix`, in fp32 or a 16-bit dtype, in 8 bits at one scale.
inline Fp8Matrix quantize(const at::Tensor& matrix, at::ScalarType format) {
  const at::Tensor scale = scale_for(largest_magnitude(matrix), largest_of(format));
  // LibTorch converts a factor without dimensions to the matrix's dtype. bf16 represents every
  // scale, and also every product with one; fp16 does not.
  const at::Tensor factor = matrix.scalar_type() == at::kHalf ? scale.view({1, 1}) : scale;
  at::Tensor codes = at::empty_like(matrix, matrix.options().dtype(format));
  at::mul_out(codes, matrix, factor);
  return {matrix.size(0), matrix.size(1), codes, scale.reciprocal(), {}, {}};
}

/// A matrix on a CPU whose rows, or its transpose's, are laid out for the kernels, in fp32 or bf16.
struct InRows {
  at::Tensor matrix;
  bool is_transposed;

  explicit InRows(at::Tensor any) : matrix(std::move(any)) {
    if (matrix.is_neg() || matrix._is_zerotensor()) matrix = matrix.clone();
    if (matrix.scalar_type() == at::kHalf) matrix = matrix.to(at::kFloat);
    is_transposed = matrix.stride(1) != 1 && matrix.stride(0) == 1;
    if (is_transposed) matrix = matrix.t();
    if (matrix.stride(1) != 1) matrix = matrix.contiguous();
  }

  /// Calls `function` with the Rows.
  template <class Function>
  void visit(const Function& function) const {
    const int64_t rows = matrix.size(0), columns = matrix.size(1), stride = matrix.stride(0);
    if (matrix.scalar_type() == at::kFloat) {
      function(Rows<const float>{matrix.template const_data_ptr<float>(), rows, columns, stride});
    } else {
      function(Rows<const c10::BFloat16>{matrix.template const_data_ptr<c10::BFloat16>(), rows,
                                         columns, stride});
    }
  }
};

/// The kernel of a CPU. `inverse_scale`: of the matrix. `scale_dtype`: the dtype of Blocks::Scale.
template <class Blocks>
Fp8Matrix quantize_on_cpu(const at::Tensor& matrix, Fp8Block block, const Blocks& blocks,
                          at::ScalarType scale_dtype, const at::Tensor& inverse_scale) {
  const InRows in_rows(matrix);
  const int64_t rows = in_rows.matrix.size(0), columns = in_rows.matrix.size(1);
  const Fp8Block lying = (in_rows.is_transposed ? block.t() : block).within(rows, columns);
  const auto options = matrix.options().dtype(at::kFloat8_e4m3fn);
  Fp8Matrix form{rows,
                 columns,
                 at::empty({rows, columns}, options),
                 inverse_scale,
                 at::empty({blocks_in(rows, lying.rows), blocks_in(columns, lying.columns)},
                           options.dtype(scale_dtype)),
                 lying};
  auto* const codes = static_cast<std::uint8_t*>(form.codes.mutable_data_ptr());
  auto* const scales = static_cast<typename Blocks::Scale*>(form.block_scales.mutable_data_ptr());
  in_rows.visit([&](const auto& source) { quantize_rows(source, lying, blocks, codes, scales); });
  return in_rows.is_transposed ? form.t() : form;
}

/// e4m3 with a power of two per block: see Note [Scales of fp8]. Scales of 1 x 32 blocks are e8m0
/// numbers. Devices other than a CPU support only whole rows.
inline Fp8Matrix quantize_blocks(const at::Tensor& matrix, Fp8Block block) {
  if (matrix.numel() == 0) return quantize(matrix, at::kFloat8_e4m3fn);
  if (matrix.is_cpu())
    return quantize_on_cpu(matrix, block, E4m3Blocks(), at::kFloat, at::Tensor());
  const at::Tensor scales =
      scale_for(norm_of_largest(matrix, at::IntArrayRef{1}), largest_of(at::kFloat8_e4m3fn));
  at::Tensor codes = at::empty(matrix.sizes(), matrix.options().dtype(at::kFloat8_e4m3fn));
  at::mul_out(codes, matrix, scales);
  return {matrix.size(0), matrix.size(1), codes, at::Tensor(), scales.reciprocal(), block};
}

/// e2m1 with an e4m3 scale per block and a power of two per tensor. On a CPU.
inline Fp8Matrix quantize_nvfp4(const at::Tensor& matrix, Fp8Block block, bool stochastic) {
  if (matrix.numel() == 0) return quantize(matrix, at::kFloat8_e4m3fn);
  const at::Tensor scale = scale_for(largest_magnitude(matrix), 6 * largest_of(at::kFloat8_e4m3fn));
  const auto of_matrix = scale.template item<float>();
  const at::Tensor inverse = scale.reciprocal();
  if (!stochastic) {
    const E2m1Blocks<E2m1Rounding::to_nearest> blocks{of_matrix, 0};
    return quantize_on_cpu(matrix, block, blocks, at::kFloat8_e4m3fn, inverse);
  }
  const auto seed = at::empty({}, at::kLong).random_().template item<int64_t>();
  const E2m1Blocks<E2m1Rounding::at_random> blocks{of_matrix, static_cast<std::uint64_t>(seed)};
  return quantize_on_cpu(matrix, block, blocks, at::kFloat8_e4m3fn, inverse);
}

/// The decoded values of blocks, without the scale of the tensor.
template <class T>
at::Tensor decoded_blocks(const Fp8Matrix& form) {
  const bool is_transposed = !form.codes.is_contiguous();
  const Fp8Matrix lying = is_transposed ? form.t() : form;
  const at::Tensor& scales = lying.block_scales;
  TORCH_INTERNAL_ASSERT(lying.codes.is_contiguous() && scales.is_contiguous());
  at::Tensor numbers =
      at::empty(lying.codes.sizes(), scales.options().dtype(c10::CppTypeToScalarType<T>()));
  const Rows<T> to{numbers.template mutable_data_ptr<T>(), numbers.size(0), numbers.size(1),
                   numbers.size(1)};
  const auto* const codes = static_cast<const std::uint8_t*>(lying.codes.const_data_ptr());
  const Fp8Block block = lying.block.within(to.rows, to.columns);
  if (scales.scalar_type() == at::kFloat) {
    decode_rows<E4m3Blocks>(codes, scales.template const_data_ptr<float>(), block, to);
  } else {
    const auto* const as_codes = static_cast<const std::uint8_t*>(scales.const_data_ptr());
    decode_rows<E2m1Blocks<E2m1Rounding::to_nearest>>(codes, as_codes, block, to);
  }
  return is_transposed ? numbers.t() : numbers;
}

/// `matrix` after the transform of its rows: see Note [The Hadamard transform].
inline at::Tensor hadamard_transformed(const at::Tensor& matrix) {
  const at::Tensor lying = matrix.t();
  const InRows in_rows(lying.stride(1) == 1 ? lying : lying.contiguous());
  const int64_t rows = blocks_in(lying.size(0), chunk) * chunk;
  at::Tensor result = at::empty({rows, lying.size(1)}, matrix.options().dtype(at::kFloat));
  in_rows.visit([&](const auto& source) {
    hadamard_transform_rows(source, result.template mutable_data_ptr<float>());
  });
  return result.t();
}

// Note [Two forms of an operand]
// The products of a layer are x w^T, g w and g^T x. Each is computed as a b^T, so both operands are
// multiplied along their columns, and each operand takes part in two products, once transposed.
// Blocks lie along the contraction. So unless blocks are square, the two forms are two different
// quantisations of one matrix.

enum class Fp8Operand : std::uint8_t { input, weight, gradient };

/// The blocks of one scale; none for `tensorwise`.
constexpr Fp8Block block_of(Fp8Recipe recipe, Fp8Operand operand) {
  const bool is_weight = operand == Fp8Operand::weight;
  switch (recipe) {
    case Fp8Recipe::rowwise:
      return {1, 0};
    case Fp8Recipe::blockwise:
      return {is_weight ? 128 : 1, 128};
    case Fp8Recipe::mxfp8:
      return {1, 32};
    case Fp8Recipe::nvfp4:
      return {is_weight ? 16 : 1, 16};
    case Fp8Recipe::tensorwise:
      break;
  }
  return {};
}

/// The form for multiplying `matrix` along its columns. `transposed`: it is the operand's
/// transpose.
inline Fp8Matrix quantize_as(const Fp8Options& options, Fp8Operand operand, bool transposed,
                             const at::Tensor& matrix) {
  const bool is_gradient = operand == Fp8Operand::gradient;
  const Fp8Block block = block_of(options.recipe, operand);
  if (options.recipe == Fp8Recipe::tensorwise) {
    return quantize(matrix, is_gradient ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn);
  }
  if (options.recipe != Fp8Recipe::nvfp4) return quantize_blocks(matrix, block);
  const bool stochastic = is_gradient && options.stochastic_rounding;
  const bool is_transformed = transposed && operand != Fp8Operand::weight && matrix.numel() > 0;
  return quantize_nvfp4(is_transformed ? hadamard_transformed(matrix) : matrix, block, stochastic);
}

/// Whether the form of the transpose is the transpose of the form.
constexpr bool is_transposable(Fp8Recipe recipe, Fp8Operand operand) {
  return recipe == Fp8Recipe::tensorwise ||
         (operand == Fp8Operand::weight &&
          (recipe == Fp8Recipe::blockwise || recipe == Fp8Recipe::nvfp4));
}

/// The form of the transpose of `matrix`, whose own form is `form`.
inline Fp8Matrix quantize_transposed(const Fp8Options& options, Fp8Operand operand,
                                     const at::Tensor& matrix, const Fp8Matrix& form) {
  if (is_transposable(options.recipe, operand)) return form.t();
  return quantize_as(options, operand, /*transposed=*/true, matrix.t());
}

}  // namespace TORCHAMP_NAMESPACE::detail
