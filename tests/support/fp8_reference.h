// SPDX-License-Identifier: BSD-3-Clause
// Small floating-point formats, slowly and from their definitions alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <cstdint>
#include <limits>

/// A format of one sign bit, `exponent_bits` and `mantissa_bits`, in the low bits of a code.
struct SmallFormat {
  int exponent_bits, mantissa_bits, bias;
  bool has_inf;       // as IEEE 754 has it: all bits of the exponent set are inf or NaN
  bool has_nan_only;  // no inf; NaN is all bits set but the sign

  int codes() const { return 1 << (1 + exponent_bits + mantissa_bits); }

  double value(int code) const {
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const int exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double sign = (code >> (mantissa_bits + exponent_bits)) != 0 ? -1 : 1;
    const bool all_set = exponent == (1 << exponent_bits) - 1;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    if (has_inf && all_set) {
      return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : nan;
    }
    if (has_nan_only && all_set && mantissa == (1 << mantissa_bits) - 1) return nan;
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                         : sign * std::ldexp(1 + fraction, exponent - bias);
  }

  double largest() const {
    double largest = 0;
    for (int code = 0; code < codes(); ++code) {
      if (std::isfinite(value(code))) largest = std::fmax(largest, value(code));
    }
    return largest;
  }

  /// The nearest code to a number that is at most largest(); of two, the one with an even mantissa.
  int nearest(double number) const {
    const int half = codes() / 2;
    int best = 0;
    double distance = std::numeric_limits<double>::infinity();
    for (int code = 0; code < half; ++code) {
      if (!std::isfinite(value(code))) continue;
      const double to_code = std::fabs(value(code) - std::fabs(number));
      if (to_code < distance || (to_code == distance && code % 2 == 0)) {
        best = code;
        distance = to_code;
      }
    }
    return std::signbit(number) ? best + half : best;
  }
};

inline constexpr SmallFormat e4m3{4, 3, 7, false, true};
inline constexpr SmallFormat e5m2{5, 2, 15, true, false};

/// What a code of e8m0 means: a power of two, or NaN.
inline double e8m0_value(int code) {
  return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1, code - 127);
}

/// The largest power of two with magnitude * scale <= largest.
inline double power_of_two_scale(double magnitude, double largest) {
  double scale = std::ldexp(1, 120);
  while (magnitude * scale > largest) scale /= 2;
  return scale;
}

/// The largest magnitude of a tensor, in fp64.
inline double largest_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : tensor.detach().to(at::kDouble).abs().max().item<double>();
}

/// `tensor` in fp64, each element through `format` at `scale` and back.
inline at::Tensor through(const SmallFormat& format, const at::Tensor& tensor, double scale) {
  at::Tensor result = tensor.detach().to(at::kDouble).contiguous().clone();
  auto* const values = result.data_ptr<double>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    values[i] = format.value(format.nearest(values[i] * scale)) / scale;
  }
  return result;
}

/// As the recipe `tensorwise` does it.
inline at::Tensor through(const SmallFormat& format, const at::Tensor& tensor) {
  const double magnitude = std::fmax(largest_of(tensor), std::ldexp(1, -110));
  return through(format, tensor, power_of_two_scale(magnitude, format.largest()));
}

inline constexpr SmallFormat e2m1{2, 1, 1, false, false};

/// `matrix` in fp64, each block of `rows` x `columns` through e4m3 at its own power of two.
inline at::Tensor through_blocks(const at::Tensor& matrix, int64_t rows, int64_t columns) {
  at::Tensor result = matrix.detach().to(at::kDouble).contiguous().clone();
  for (int64_t row = 0; row < result.size(0); row += rows) {
    for (int64_t column = 0; column < result.size(1); column += columns) {
      const at::Tensor block = result.slice(0, row, row + rows).slice(1, column, column + columns);
      block.copy_(through(e4m3, block));
    }
  }
  return result;
}

/// `matrix` in fp64, as NVFP4 with blocks of `rows` x 16 has it, rounded to the nearest. Divides in
/// fp32, as the recipe does.
inline at::Tensor through_nvfp4(const at::Tensor& matrix, int64_t rows) {
  const double scale =
      power_of_two_scale(std::fmax(largest_of(matrix), std::ldexp(1, -110)), 6 * 448.);
  at::Tensor result = matrix.detach().to(at::kDouble).contiguous().clone();
  for (int64_t row = 0; row < result.size(0); row += rows) {
    for (int64_t column = 0; column < result.size(1); column += 16) {
      at::Tensor block = result.slice(0, row, row + rows).slice(1, column, column + 16);
      const auto largest = static_cast<float>(largest_of(block) * scale);
      const double block_scale = e4m3.value(e4m3.nearest(std::fmax(largest / 6, 0x1p-9F)));
      at::Tensor values = block.contiguous();
      for (int64_t i = 0; i < values.numel(); ++i) {
        double& value = values.data_ptr<double>()[i];
        const float number = static_cast<float>(value * scale) / static_cast<float>(block_scale);
        value =
            e2m1.value(e2m1.nearest(std::fmax(-6.F, std::fmin(6.F, number)))) * block_scale / scale;
      }
      block.copy_(values);
    }
  }
  return result;
}

/// How far a product in bf16 of a GPU's fp8 units may lie from the rehearsal, for `a` [M, K] times
/// `b` [K, N]. Its units align up to 32 products to the largest and keep 14 bits of each, so that
/// each of the K products loses less than 2^-13 of the largest of its sum, or 2^-12 with what
/// quantisation may add to it; and both results are rounded to 8 bits.
inline at::Tensor fp8_units_tolerance(const at::Tensor& rehearsed, const at::Tensor& a,
                                      const at::Tensor& b) {
  const at::Tensor rounding = rehearsed.abs().to(at::kDouble) * 0x1p-7;
  if (a.size(1) == 0) return rounding;
  const at::Tensor largest =
      a.to(at::kDouble).abs().amax(1, true).mul(b.to(at::kDouble).abs().amax(0, true));
  return rounding + static_cast<double>(a.size(1)) * 0x1p-12 * largest;
}
