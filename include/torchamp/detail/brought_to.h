// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// `tensor` on `device`. A copy from a device to the host is waited for, as kernels of the host
/// look at it at once (LibTorch's non_blocking copies to the host return before they are made); no
/// other copy is.
inline at::Tensor brought_to(at::Device device, const at::Tensor& tensor) {
  if (tensor.device() == device) return tensor;
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace torchamp::detail
