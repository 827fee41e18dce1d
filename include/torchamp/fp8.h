// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Fp8Options: how the products of a Policy's fp8 rule are made.

#include <cstdint>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// How the operands of a product become 8-bit numbers, and at what scales.
enum class Fp8Recipe : std::uint8_t {
  /// One scale a tensor, of this very call: the power of two that brings the largest magnitude just
  /// below the format's. e4m3 in forward, e5m2 for gradients.
  tensorwise,
};

/// What Policy::fp8 takes beside the ops. An aggregate: `{.recipe = Fp8Recipe::tensorwise}`.
struct Fp8Options {
  /// How operands are scaled and rounded.
  Fp8Recipe recipe = Fp8Recipe::tensorwise;
  /// Whether a device that has no fp8 products for this recipe is an error at the guard. Otherwise
  /// the calls run as lower_precision there; a CastRecorder says how many, and why.
  bool strict = false;
  /// Whether calls that are known to gain nothing on a GPU run as lower_precision, on every device
  /// alike: those with K (the contraction) or N (the columns of the result) not a multiple of 16,
  /// and those with K up to 4096 and N up to 1024. Source: torchao/float8/float8_linear_utils.py.
  bool only_worthwhile = false;

  /// Fp8 where it is worth it: with `only_worthwhile`.
  static constexpr Fp8Options worthwhile(Fp8Recipe recipe = Fp8Recipe::tensorwise) {
    return {.recipe = recipe, .strict = false, .only_worthwhile = true};
  }

  /// Equal when every member is.
  bool operator==(const Fp8Options&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
