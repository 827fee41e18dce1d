// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <atomic>

#include "torchamp/cpu_products.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Decides how CPUs compute products in `dtype`, and registers kernels if that is in fp32. Errors:
/// a bad value of TORCHAMP_CPU_PRODUCTS.
void decide_cpu_products(at::ScalarType dtype);

/// The same, if it is not decided. For all that is about to compute in 16 bits on a CPU. Any
/// thread.
inline void prepare_cpu_products(at::ScalarType dtype) {
  const auto& matrices = shared_runtime().cpu_products.of(dtype).front().kernels;
  if (matrices.load(std::memory_order_acquire) == ProductKernels::undecided) {
    decide_cpu_products(dtype);
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/products/cpu_products-inl.h"  // IWYU pragma: export
#endif
