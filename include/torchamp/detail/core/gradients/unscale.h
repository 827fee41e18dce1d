// SPDX-License-Identifier: BSD-3-Clause
// Divides gradients by the scale, and checks them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/check_finite.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"

namespace torchamp::detail {

/// Calls `function` with fp32 copies of the gradients, of bounded size together, until it has had
/// all, and copies back what it has made of them.
template <class Function>
void through_fp32(const GradientBatch& batch, const Function& function,
                  int64_t elements_at_once = int64_t{1} << 24) {
  const at::TensorList all = batch.gradients;
  for (std::size_t begin = 0; begin < all.size();) {
    GradientBatch wide{{batch.device, at::kFloat}};
    int64_t elements = 0;
    for (const at::Tensor& gradient : all.slice(begin)) {
      elements += gradient.numel();
      if (elements > elements_at_once && !wide.gradients.empty()) break;
      wide.gradients.push_back(at::empty_like(gradient, gradient.options().dtype(at::kFloat)));
    }
    const at::TensorList narrow = all.slice(begin, wide.gradients.size());
    at::_foreach_copy_(wide.gradients, narrow);
    function(wide);
    at::_foreach_copy_(narrow, wide.gradients);
    begin += wide.gradients.size();
  }
}

/// Multiplies gradients in place by `factor`, 0-dim fp32 on their device (exactly 1 changes
/// nothing), and sets `flag` as check_finite() does for what they were before.
inline void multiply_and_check(const GradientBatch& batch, const at::Tensor& factor,
                               at::Tensor& flag) {
  if (unscale_kernel_takes(batch)) {
    at::_amp_foreach_non_finite_check_and_unscale_(batch.gradients, flag, factor);
  } else if (is_16_bit(batch.dtype)) {
    through_fp32(batch, [&](const GradientBatch& wide) { multiply_and_check(wide, factor, flag); });
  } else {
    check_finite(batch, flag);
    at::_foreach_mul_(batch.gradients, factor.to(batch.dtype));
  }
}

/// Multiplies every gradient in place by `factor(device)`, a 0-dim fp32 tensor there (a factor of
/// exactly 1 changes nothing), and sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any was not finite
/// before. A few kernels for each device and dtype; for reads see DeviceFlags.
inline void multiply_and_check(const std::vector<GradientBatch>& batches,
                               c10::function_ref<at::Tensor(at::Device)> factor,
                               at::Tensor& found_inf) {
  DeviceFlags flags(found_inf);
  std::vector<at::Tensor> factors;  // one for each device
  for (const GradientBatch& batch : batches) {
    std::size_t d = 0;
    while (d < factors.size() && factors[d].device() != batch.device) ++d;
    if (d == factors.size()) factors.push_back(factor(batch.device));
    multiply_and_check(batch, factors[d], flags.on(batch.device));
  }
  flags.gather();
}

}  // namespace torchamp::detail
