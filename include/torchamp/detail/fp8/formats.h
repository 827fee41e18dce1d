// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <cstddef>
#include <cstdint>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The largest number of an 8-bit format: e4m3 has 3 bits of mantissa, e5m2 has 2. Both are 1.75
/// times a power of two.
inline double largest_of(at::ScalarType format) {
  return format == at::kFloat8_e4m3fn ? 448. : 57344.;
}

/// What each of the 256 codes of `Format` means.
template <class Format, class Value>
struct DecodeTable {
  DecodeTable() {
    for (unsigned code = 0; code < 256; ++code) {
      const Format value(static_cast<std::uint8_t>(code), Format::from_bits());
      values[code] = static_cast<Value>(static_cast<float>(value));
    }
  }
  Value values[256];
};

/// The values of dense 8-bit codes on a CPU, in a dtype that holds all of them exactly. LibTorch's
/// own conversion of e4m3 takes ten times as long.
template <class Format, class Value>
at::Tensor decode_as(const at::Tensor& codes) {
  static const DecodeTable<Format, Value> table;
  at::Tensor values =
      at::empty_like(codes, codes.options().dtype(c10::CppTypeToScalarType<Value>()));
  TORCH_INTERNAL_ASSERT(values.strides() == codes.strides(), "fp8 codes with gaps");
  const auto* const from = static_cast<const std::uint8_t*>(codes.const_data_ptr());
  auto* const to = static_cast<Value*>(values.mutable_data_ptr());
  at::parallel_for(0, codes.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = table.values[from[i]];
  });
  return values;
}

/// As decode_as(), in bf16 or fp32.
inline at::Tensor decode(const at::Tensor& codes, at::ScalarType dtype) {
  const bool e4m3 = codes.scalar_type() == at::kFloat8_e4m3fn;
  if (dtype == at::kBFloat16) {
    return e4m3 ? decode_as<c10::Float8_e4m3fn, c10::BFloat16>(codes)
                : decode_as<c10::Float8_e5m2, c10::BFloat16>(codes);
  }
  return e4m3 ? decode_as<c10::Float8_e4m3fn, float>(codes)
              : decode_as<c10::Float8_e5m2, float>(codes);
}

}  // namespace torchamp::detail
