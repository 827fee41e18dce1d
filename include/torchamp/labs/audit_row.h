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
  /// Dotted name; empty if no module is known.
  std::string module{};
  /// With its overload, like in a Policy: "softmax.int".
  std::string op{};
  /// Calls per step.
  int64_t calls = 0;
  /// Elements in the results of all calls.
  int64_t elements = 0;
  /// The sum of (dL/dout)^2 (out16 - out32)^2 over them, those that depend on no parameter
  /// included; infinite if a result on which the loss depends overflows, or the op cannot run in 16
  /// bits.
  double error = 0.;
  /// The largest share, over all calls, of the squared gradients of a result that is lost by
  /// rounding them to 16 bits; 1 if all become 0, infinite if one overflows.
  double gradient_loss = 0.;
  /// Shares of the results that in 16 bits are too small for full precision (0 included); are
  /// infinite but finite in fp32; are 0 but not in fp32.
  double underflow = 0., overflow = 0., vanished = 0.;
  /// Largest and smallest non-zero magnitude of the results in fp32.
  double largest = 0., smallest = 0.;
  /// Microseconds per step: forward and backward in fp32; in 16 bits; casts of all its tensor
  /// arguments, and back in backward.
  double fp32_us = 0., low_us = 0., cast_us = 0.;
  /// Why it cannot run in 16 bits; empty if it can.
  std::string problem{};

  bool operator==(const AuditRow&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
