// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "torchamp/detail/fp8/blocks.h"
#include "torchamp/detail/fp8/quantize.h"
#include "torchamp/fp8_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Two forms of an operand]
// The products of a layer are x w^T, g w and g^T x. Each is made as a b^T, so that both factors are
// multiplied along their columns, and each operand takes part in two of them, once as it is and
// once transposed. Blocks lie along the contraction. So where they are not square, the two forms
// are two different quantisations of one matrix.

/// Which operand of a layer.
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

/// The form in which `matrix` is multiplied along its columns. `transposed`: it is the transpose of
/// the operand.
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

}  // namespace torchamp::detail
