// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "torchamp/detail/fp8/formats.h"
#include "torchamp/detail/fp8/quantize.h"
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

/// See Note [The rehearsal of fp8 on a CPU].
template <class Tensor>
Tensor rehearsed_product(const Fp8Matrix<Tensor>& a, const Fp8Matrix<Tensor>& b,
                         at::ScalarType dtype) {
  const bool in_bf16 = dtype == at::kBFloat16 && cpu_multiplies_bf16();
  const at::ScalarType values = in_bf16 ? at::kBFloat16 : at::kFloat;
  Tensor product = at::mm(decode(a.codes, values), decode(b.codes, values).t());
  return product.mul_(a.inverse_scale.mul(b.inverse_scale)).to(dtype);
}

/// Row-major, with zeros behind rows and columns up to multiples of 16. As bytes: not every kernel
/// that this takes has the 8-bit formats, and the zero of both is 0.
template <class Tensor>
Tensor padded_to_16(const Tensor& codes, bool pad_rows) {
  const auto missing = [](int64_t size) { return (16 - size % 16) % 16; };
  const int64_t rows = pad_rows ? missing(codes.size(0)) : 0;
  const int64_t columns = missing(codes.size(1));
  Tensor bytes = codes.view(at::kByte);
  if (rows != 0 || columns != 0) bytes = at::constant_pad_nd(bytes, {0, columns, 0, rows});
  return bytes.contiguous().view(codes.scalar_type());
}

/// `a` [M, K] times the transpose of `b` [N, K], in `dtype`. `fast`: a GPU may keep fewer bits of
/// the sums.
template <class Tensor>
Tensor fp8_product(const Fp8Matrix<Tensor>& a, const Fp8Matrix<Tensor>& b, at::ScalarType dtype,
                   bool fast) {
  const int64_t rows = a.codes.size(0);
  const int64_t columns = b.codes.size(0);
  if (rows == 0 || columns == 0 || a.codes.size(1) == 0) {
    return at::zeros({rows, columns}, a.codes.options().dtype(dtype));
  }
  if (a.codes.is_cpu()) return rehearsed_product(a, b, dtype);
  const Tensor product = at::_scaled_mm(
      padded_to_16(a.codes, /*pad_rows=*/false), padded_to_16(b.codes, /*pad_rows=*/true).t(),
      a.inverse_scale, b.inverse_scale, /*bias=*/{}, /*scale_result=*/{}, dtype, fast);
  return product.narrow(1, 0, columns).contiguous();
}

/// Why fp8_product() cannot be on the current device of a type, by a trial of 16 x 16; empty if it
/// can.
template <class Tensor>
std::string why_no_fp8_product(at::DeviceType device) {
  if (device == at::kCPU) return {};
  try {
    const auto options = at::TensorOptions(device).dtype(at::kFloat);
    const Fp8Matrix<Tensor> zeros{
        at::zeros({16, 16}, options.dtype(at::kByte)).view(at::kFloat8_e4m3fn),
        at::zeros({}, options)};
    (void)fp8_product(zeros, zeros, at::kBFloat16, /*fast=*/true);
    return {};
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  }
}

}  // namespace torchamp::detail
