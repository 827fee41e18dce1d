// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "torchamp/detail/gradients/collect.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Multiplies every gradient in place by `factor(device)`, a 0-dim fp32 tensor there (a factor of
/// exactly 1 changes nothing), and sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any was not finite
/// before. One kernel for each device and dtype; never reads a device, though the flags of others
/// are waited for where `found_inf` lies on the host.
inline void multiply_and_check(const std::vector<GradientBatch>& batches,
                               c10::function_ref<at::Tensor(at::Device)> factor,
                               at::Tensor& found_inf) {
  std::vector<at::Tensor> factors, flags;  // one for each device
  for (const GradientBatch& batch : batches) {
    std::size_t d = 0;
    while (d < flags.size() && flags[d].device() != batch.device) ++d;
    if (d == flags.size()) {
      const bool at_home = batch.device == found_inf.device();
      factors.push_back(factor(batch.device));
      flags.push_back(at_home ? found_inf
                              : at::zeros({}, found_inf.options().device(batch.device)));
    }
    at::_amp_foreach_non_finite_check_and_unscale_(batch.gradients, flags[d], factors[d]);
  }
  for (const at::Tensor& flag : flags) {
    if (!flag.is_same(found_inf)) {
      found_inf.add_(to_device_async(found_inf.device(), flag)).clamp_max_(1.);
    }
  }
}

/// The same without changing the gradients, nor their versions.
inline void check(const std::vector<GradientBatch>& batches, at::Tensor& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  multiply_and_check(
      batches, [&](at::Device device) { return at::ones({}, found_inf.options().device(device)); },
      found_inf);
}

/// Sets `found_inf` to 1 if any gradient is not finite or would not be when divided by
/// `scale`, 0-dim fp32, with at least the precision of fp32. The gradients are not changed.
inline void check_divided(const std::vector<GradientBatch>& batches, const at::Tensor& scale,
                          at::Tensor& found_inf) {
  for (const GradientBatch& batch : batches) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& gradient : batch.gradients) {
      if (gradient.numel() > 0) gradients.push_back(gradient);
    }
    if (gradients.empty()) continue;
    const bool narrow = is_16_bit(batch.dtype);
    const at::Tensor largest =
        at::stack(
            at::_foreach_norm(gradients, std::numeric_limits<double>::infinity(),
                              narrow ? std::optional(at::kFloat) : std::optional<at::ScalarType>()))
            .amax();
    const at::Tensor bad =
        largest.div(to_device_async(batch.device, scale)).isfinite().logical_not();
    found_inf.add_(to_device_async(found_inf.device(), bad));
  }
  found_inf.clamp_max_(1.);
}

}  // namespace torchamp::detail
