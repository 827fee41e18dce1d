// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// An fp32 tensor on the host that nobody has written, for non-blocking copies from `device`:
/// pinned where the accelerator has pinned memory, since copies to any other are waited for.
inline at::Tensor copy_target(at::Device device, at::IntArrayRef sizes) {
  const c10::InferenceMode no_inference(false);
  const auto options = at::TensorOptions(at::kCPU).dtype(at::kFloat);
  if (at::accelerator::getAccelerator() != device.type()) return at::empty(sizes, options);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const c10::NotImplementedError&) {  // of a device outside LibTorch, without it
    return at::empty(sizes, options);
  }
}

}  // namespace torchamp::detail
