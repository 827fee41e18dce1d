// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. AuditRow: a PrecisionAudit's measurements of one op in one module.

#include <cstdint>
#include <string>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// A PrecisionAudit's measurements of one op in one module.
struct AuditRow {
  /// The module's dotted name; empty if no module is known.
  std::string module{};
  /// The op's name with its overload, as in a Policy: "softmax.int".
  std::string op{};
  /// Calls per step.
  int64_t calls = 0;
  /// Elements in the results of all calls.
  int64_t elements = 0;
  /// The sum of (dL/dout)^2 (out16 - out32)^2 over these elements, including results that depend on
  /// no parameter. Infinite if a result on which the loss depends overflows, or if the op cannot
  /// run in 16 bits.
  double error = 0.;
  /// The share of the squared gradients of a result that rounding to 16 bits loses; the largest
  /// over all calls. 1 if all gradients become 0, infinite if one overflows.
  double gradient_loss = 0.;
  /// Shares of the results. `underflow`: not 0 in fp32, and 0 or without full precision in 16 bits.
  /// `overflow`: infinite in 16 bits but finite in fp32. `vanished`: 0 in 16 bits but not in fp32.
  double underflow = 0., overflow = 0., vanished = 0.;
  /// Largest and smallest non-zero magnitude of the results in fp32.
  double largest = 0., smallest = 0.;
  /// Microseconds per step: forward and backward in fp32 (fp32_us) and in 16 bits (low_us); casts
  /// of all tensor arguments, and of their gradients in backward (cast_us).
  double fp32_us = 0., low_us = 0., cast_us = 0.;
  /// Why the op cannot run in 16 bits; empty if it can.
  std::string problem{};

  bool operator==(const AuditRow&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
