// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "torchamp/detail/fp8/blocks.h"
#include "torchamp/detail/fp8/formats.h"
#include "torchamp/detail/fp8/quantize.h"
#include "torchamp/detail/fp8/recipes.h"
#include "torchamp/fp8_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [The rehearsal of fp8 on a CPU]
// Every code of both formats is exact in bf16, and the sums of a bf16 product are made in fp32. So
// a bf16 product of the decoded values, multiplied by the scales (powers of two), is what the fp8
// units of a GPU compute, but for the order of the sums and what these keep of it. Where bf16
// products are slow, or the result is fp16, whose range the unscaled sums would leave, the product
// is made in fp32 and rounded once.

/// Whether this CPU has instructions for bf16 products.
inline bool cpu_multiplies_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;  // those with AMX have it, too
#else
  return false;
#endif
}

/// What the matrix stands for but for its inverse_scale, in bf16 or fp32. Exact: a block's scale is
/// a power of two, or has 4 bits beside an element's 2.
inline at::Tensor decoded(const Fp8Matrix& matrix, at::ScalarType dtype) {
  if (!matrix.block_scales.defined()) return decode(matrix.codes, dtype);
  return dtype == at::kFloat ? decoded_blocks<float>(matrix)
                             : decoded_blocks<c10::BFloat16>(matrix);
}

/// See Note [The rehearsal of fp8 on a CPU].
inline at::Tensor rehearsed_product(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType dtype) {
  const bool in_bf16 = dtype == at::kBFloat16 && cpu_multiplies_bf16();
  const at::ScalarType values = in_bf16 ? at::kBFloat16 : at::kFloat;
  at::Tensor product = at::mm(decoded(a, values), decoded(b, values).t());
  if (a.inverse_scale.defined()) product.mul_(a.inverse_scale.mul(b.inverse_scale));
  return product.to(dtype);
}

/// Row-major, with zeros behind rows and columns up to multiples of 16. As bytes: not every kernel
/// that this takes has the 8-bit formats, and the zero of both is 0.
inline at::Tensor padded_to_16(const at::Tensor& codes, bool pad_rows) {
  const auto missing = [](int64_t size) { return (16 - size % 16) % 16; };
  const int64_t rows = pad_rows ? missing(codes.size(0)) : 0;
  const int64_t columns = missing(codes.size(1));
  at::Tensor bytes = codes.view(at::kByte);
  if (rows != 0 || columns != 0) bytes = at::constant_pad_nd(bytes, {0, columns, 0, rows});
  return bytes.contiguous().view(codes.scalar_type());
}

/// `a` [M, K] times the transpose of `b` [N, K], in `dtype`. `fast`: a GPU may keep fewer bits of
/// the sums.
inline at::Tensor fp8_product(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType dtype,
                              bool fast) {
  if (a.rows == 0 || b.rows == 0 || a.columns == 0) {
    return at::zeros({a.rows, b.rows}, a.codes.options().dtype(dtype));
  }
  if (a.codes.is_cpu()) return rehearsed_product(a, b, dtype);
  const at::Tensor columns = padded_to_16(b.codes, /*pad_rows=*/true);
  at::Tensor scale_a = a.inverse_scale, scale_b = b.inverse_scale;
  if (a.block_scales.defined()) {  // one a row
    scale_a = a.block_scales.contiguous();
    scale_b = at::constant_pad_nd(b.block_scales.t(), {0, columns.size(0) - b.rows}).contiguous();
  }
  const at::Tensor product =
      at::_scaled_mm(padded_to_16(a.codes, /*pad_rows=*/false), columns.t(), scale_a, scale_b,
                     /*bias=*/{}, /*scale_result=*/{}, dtype, fast);
  return product.narrow(1, 0, b.rows).contiguous();
}

/// Why fp8_product() cannot be on the current device of a type, by a trial of 16 x 16; empty if it
/// can.
inline std::string why_no_fp8_product(const Fp8Options& options, at::DeviceType device) {
  if (device == at::kCPU) return {};
  if (options.recipe != Fp8Recipe::tensorwise && options.recipe != Fp8Recipe::rowwise) {
    return "products of this recipe are made on a CPU only";
  }
  try {
    const at::Tensor zeros = at::zeros({16, 16}, at::TensorOptions(device).dtype(at::kBFloat16));
    const auto matrix = quantize_as(options, Fp8Operand::input, /*transposed=*/false, zeros);
    (void)fp8_product(matrix, matrix, at::kBFloat16, /*fast=*/true);
    return {};
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  }
}

}  // namespace torchamp::detail
