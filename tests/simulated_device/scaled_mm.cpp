// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>

#include <atomic>

#include "simulated_device/scaled_mm.h"

#include "simulated_device/kernel.h"
#include "simulated_device/register.h"

namespace simulated {

namespace {

using at::Tensor;

std::atomic<bool> has_fp8_units = true;

bool is_fp8(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kFloat8_e5m2;
}

// What aten/src/ATen/native/cuda/ScaledBlas.cpp asks of its arguments.
void check(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
           const c10::IValue& bias, at::ScalarType out) {
  TORCH_CHECK(
      has_fp8_units,
      "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or "
      "8.9");
  TORCH_CHECK(a.dim() == 2, "mat1 must be a matrix");
  TORCH_CHECK(b.dim() == 2, "mat2 must be a matrix");
  TORCH_CHECK(a.size(1) == b.size(0), "mat1 and mat2 shapes cannot be multiplied (", a.sizes(),
              " and ", b.sizes(), ")");
  TORCH_CHECK(is_fp8(a) && is_fp8(b), "Expected mat1 and mat2 to be Float8 matrices, got ",
              a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2,
              "Multiplication of two Float8_e5m2 matrices is not supported");
  TORCH_CHECK(a.numel() > 0 && b.numel() > 0, "cuBLAS takes no empty matrices");
  TORCH_CHECK(a.size(1) % 16 == 0,
              "Expected trailing dimension of mat1 to be divisible by 16 but "
              "got mat1 shape: ",
              a.sizes());
  TORCH_CHECK(b.size(0) % 16 == 0 && b.size(1) % 16 == 0, "mat2 shape (", b.sizes(),
              ") must be divisible by 16");
  TORCH_CHECK(a.stride(1) == 1 && a.stride(0) >= a.size(1), "mat1 must be row-major");
  TORCH_CHECK(b.stride(0) == 1 && b.stride(1) >= b.size(0), "mat2 must be column-major");
  TORCH_CHECK(scale_a.scalar_type() == at::kFloat && scale_b.scalar_type() == at::kFloat,
              "scales must be float tensors");
  const bool tensorwise = scale_a.numel() == 1 && scale_b.numel() == 1;
  const bool rowwise = scale_a.dim() == 2 && scale_b.dim() == 2 && scale_a.size(0) == a.size(0) &&
                       scale_a.size(1) == 1 && scale_b.size(0) == 1 &&
                       scale_b.size(1) == b.size(1) && scale_a.is_contiguous() &&
                       scale_b.is_contiguous();
  TORCH_CHECK(tensorwise || rowwise, "Invalid scaling configuration: ", scale_a.sizes(), " and ",
              scale_b.sizes());
  TORCH_CHECK(tensorwise || out == at::kBFloat16,
              "Only bf16 high precision output types are supported for row-wise scaling.");
  TORCH_CHECK(bias.isNone() || out != at::kFloat,
              "Bias is not supported when out_dtype is set to Float32");
}

void scaled_mm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_kernel(op, stack, [](torch::jit::Stack* s) {
    const auto argument = s->end() - 8;
    const Tensor a = argument[0].toTensor(), b = argument[1].toTensor();
    const Tensor scale_a = argument[2].toTensor(), scale_b = argument[3].toTensor();
    const c10::IValue bias = argument[4];
    const at::ScalarType out = argument[6].isNone() ? a.scalar_type() : argument[6].toScalarType();
    check(a, b, scale_a, scale_b, bias, out);
    Tensor product = at::mm(a.to(at::kFloat), b.to(at::kFloat)).mul_(scale_a).mul_(scale_b);
    if (!bias.isNone()) product.add_(bias.toTensor());
    torch::jit::drop(*s, 8);
    torch::jit::push(*s, product.to(out));
  });
}

}  // namespace

NoFp8Units::NoFp8Units() {
  has_fp8_units = false;
}
NoFp8Units::~NoFp8Units() {
  has_fp8_units = true;
}

void register_scaled_mm(torch::Library& aten) {
  aten.impl("_scaled_mm", torch::CppFunction::makeFromBoxedFunction<&scaled_mm>());
}

}  // namespace simulated
