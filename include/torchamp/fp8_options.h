// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Fp8Options: how the products of a Policy's fp8 rule are made. See fp8.h.

#include <cstdint>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// How the operands of a product become numbers of 8 or 4 bits, and at what scales. All scales are
/// of this very call.
enum class Fp8Recipe : std::uint8_t {
  /// One scale a tensor: the largest power of two that keeps every element in the format's range.
  /// e4m3 in forward, e5m2 for gradients.
  tensorwise,
  /// e4m3 everywhere, such a scale for each row of what is multiplied.
  rowwise,
  /// e4m3 everywhere, such a scale for each 1 x 128 elements, in weights for each 128 x 128. As
  /// TransformerEngine's Float8BlockScaling.
  blockwise,
  /// e4m3 everywhere, such a scale (an e8m0 number) for each 1 x 32 elements.
  mxfp8,
  /// e2m1, 4 bits; an e4m3 scale for each 1 x 16 elements, in weights for each 16 x 16, and a power
  /// of two for the tensor. Gradients are rounded at random (LibTorch's generator of the CPU gives
  /// a seed for each); weights' gradients are made of factors that a Hadamard transform has spread.
  /// As TransformerEngine's NVFP4BlockScaling, whose scale of the tensor is no power of two. The
  /// mean of random rounding is right: scales of blocks are rounded up there, so that nothing lies
  /// beyond the largest number, where TransformerEngine rounds them to the nearest and cuts.
  nvfp4,
};

/// What Policy::fp8 takes beside the ops. An aggregate: `{.recipe = Fp8Recipe::tensorwise}`.
struct Fp8Options {
  /// How operands are scaled and rounded.
  Fp8Recipe recipe = Fp8Recipe::tensorwise;
  /// Whether `nvfp4` rounds gradients at random, and not to the nearest. (False is
  /// `round_to_nearest` in a policy's text; the other recipes always round to the nearest.)
  bool stochastic_rounding = true;
  /// Whether a device that has no fp8 products for this recipe, or none in regions of this dtype
  /// (rowwise ones in fp16 on a GPU), is an error at the guard, and of a module's policy at the
  /// module's forward. Otherwise the calls run as lower_precision there; a CastRecorder says how
  /// many, and why.
  bool strict = false;
  /// Whether calls that are known to gain nothing on a GPU run as lower_precision, on every device
  /// alike: those with K (the contraction) or N (the columns of the result) not a multiple of 16,
  /// and those with K up to 4096 and N up to 1024. Source: torchao/float8/float8_linear_utils.py.
  bool only_worthwhile = false;

  /// Fp8 where it is worth it: with `only_worthwhile`.
  static constexpr Fp8Options worthwhile(Fp8Recipe recipe = Fp8Recipe::tensorwise) {
    return {
        .recipe = recipe, .stochastic_rounding = true, .strict = false, .only_worthwhile = true};
  }

  /// Equal when every member is.
  bool operator==(const Fp8Options&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
