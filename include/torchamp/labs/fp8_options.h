// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. Fp8Options: recipe and rounding of a policy's fp8 rule. See fp8.h.

#include <cstdint>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// How the operands of a product are quantised to 8 or 4 bits, with current (not delayed) scaling.
enum class Fp8Recipe : std::uint8_t {
  /// One scale per tensor: the largest power of two with which every element is in the format's
  /// range. e4m3 in forward, e5m2 for gradients.
  tensorwise,
  /// e4m3 everywhere; one such scale per row of the first operand and per column of the second.
  rowwise,
  /// e4m3 everywhere; one such scale per 1 x 128 block, in weights per 128 x 128 block. Like
  /// TransformerEngine's Float8BlockScaling.
  blockwise,
  /// e4m3 everywhere; one such scale (an e8m0 number) per 1 x 32 block.
  mxfp8,
  /// e2m1 (4 bits); an e4m3 scale per 1 x 16 block, in weights per 16 x 16 block, and a power of
  /// two per tensor. Gradients are rounded stochastically (seeded from LibTorch's CPU generator).
  /// For a weight's gradient, a Hadamard transform is applied to the operands first.
  ///
  /// Like TransformerEngine's NVFP4BlockScaling, with two differences: here the scale per tensor is
  /// a power of two, and block scales are rounded up instead of to nearest. So no element
  /// saturates, and stochastic rounding is unbiased.
  nvfp4,
};

/// Options of fp8(). An aggregate: `{.recipe = Fp8Recipe::tensorwise}`.
struct Fp8Options {
  /// How operands are scaled and rounded.
  Fp8Recipe recipe = Fp8Recipe::tensorwise;
  /// Whether `nvfp4` rounds gradients stochastically instead of to nearest. The other recipes
  /// always round to nearest. In a policy's text, false is `round_to_nearest`.
  bool stochastic_rounding = true;
  /// True: the guard throws if the device has no fp8 products for this recipe, or none in the
  /// region's dtype (rowwise in fp16 on a GPU); for a module's policy, the module's forward throws.
  /// False: such calls run as lower_precision; a CastRecorder counts them, with the reason.
  bool strict = false;
  /// Whether calls that gain nothing on a GPU run as lower_precision, on every device. A call gains
  /// nothing if K (the contraction) or N (the columns of the result) is not a multiple of 16, or if
  /// K is up to 4096 and N up to 1024. Source: torchao/float8/float8_linear_utils.py.
  bool only_worthwhile = false;

  /// Options with `only_worthwhile`.
  static constexpr Fp8Options worthwhile(Fp8Recipe recipe = Fp8Recipe::tensorwise) {
    return {
        .recipe = recipe, .stochastic_rounding = true, .strict = false, .only_worthwhile = true};
  }

  /// Whether all members are equal.
  bool operator==(const Fp8Options&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
