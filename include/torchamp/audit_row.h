// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief AuditRow: what a PrecisionAudit measured of one op in one module.

#include <cstdint>
#include <string>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What a PrecisionAudit measured of one op in one module.
struct AuditRow {
  /// Dotted name, or empty where no module is known.
  std::string module{};
  /// With its overload, as a Policy takes it: "softmax.int".
  std::string op{};
  /// How often a step calls it.
  int64_t calls = 0;
  /// Numbers in its results, of all calls.
  int64_t elements = 0;
  /// The sum of (dL/dout)^2 (out16 - out32)^2 over them; infinite if it overflows where a gradient
  /// arrives, or cannot run in 16 bits.
  double error = 0.;
  /// The largest share, over all calls, of the squared gradients arriving at a result that is lost
  /// by rounding them to 16 bits; 1 if all become 0, infinite if one overflows.
  double gradient_loss = 0.;
  /// Shares of the results that in 16 bits are too small for full precision (0 included), are
  /// infinite though fp32 holds them, or are 0 though in fp32 they are not.
  double underflow = 0., overflow = 0., vanished = 0.;
  /// Magnitudes of the results in fp32; the smallest is that of those which are not 0.
  double largest = 0., smallest = 0.;
  /// Microseconds of a step: forward and backward in fp32, in 16 bits, and of casting all tensors
  /// that it takes, there and back in backward.
  double fp32_us = 0., low_us = 0., cast_us = 0.;
  /// Why it cannot run in 16 bits; empty if it can.
  std::string problem{};

  bool operator==(const AuditRow&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
