// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "torchamp/detail/gradients.h"

namespace torchamp::detail {

/// Multiplies every gradient in place by `factor(device)`, a 0-dim fp32 tensor there (a factor of
/// exactly 1 changes nothing), and sets `found_inf`, 0-dim fp32, to non-zero if any was not finite
/// before. One kernel for each device and dtype; never reads a device.
template <typename Factor>
void multiply_and_check(const std::vector<GradientBatch>& batches, const Factor& factor,
                        at::Tensor& found_inf) {
  struct OnDevice {
    at::Tensor factor, found_inf;
  };
  std::vector<OnDevice> devices;
  for (const GradientBatch& batch : batches) {
    auto here = std::find_if(devices.begin(), devices.end(), [&](const OnDevice& d) {
      return d.found_inf.device() == batch.device;
    });
    if (here == devices.end()) {
      const bool at_home = batch.device == found_inf.device();
      devices.push_back(
          {factor(batch.device),
           at_home ? found_inf : at::zeros({}, found_inf.options().device(batch.device))});
      here = devices.end() - 1;
    }
    at::_amp_foreach_non_finite_check_and_unscale_(batch.gradients, here->found_inf, here->factor);
  }
  for (const OnDevice& d : devices) {
    if (!d.found_inf.is_same(found_inf)) {
      found_inf.add_(d.found_inf.to(found_inf.device(), /*non_blocking=*/true));
    }
  }
  if (devices.size() > 1) found_inf.clamp_max_(1.);
}

/// The same without changing the gradients.
inline void check(const std::vector<GradientBatch>& batches, at::Tensor& found_inf) {
  multiply_and_check(
      batches, [&](at::Device device) { return at::ones({}, found_inf.options().device(device)); },
      found_inf);
}

}  // namespace torchamp::detail
