// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>

// The dtypes in which ops run on the CPU, as the calling thread is set now.
namespace cpu_dtypes {

inline at::Tensor ones(at::DeviceType device, at::ScalarType dtype) {
  return at::ones({4, 4}, at::TensorOptions(device).dtype(dtype));
}

inline at::ScalarType mm_dtype() {
  return ones(at::kCPU, at::kFloat).mm(ones(at::kCPU, at::kFloat)).scalar_type();
}
inline at::ScalarType add_dtype(at::ScalarType dtype) {
  return (ones(at::kCPU, dtype) + ones(at::kCPU, dtype)).scalar_type();
}

}  // namespace cpu_dtypes
