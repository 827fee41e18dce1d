// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <torch/version.h>

#include <array>
#include <optional>

#include "torchamp/version.h"

// Note [Versions of LibTorch]
// torchamp takes LibTorch 2.6 to 2.15, and newer ones as far as they go. What differs between them
// is here, or asks TORCHAMP_LIBTORCH where it needs a header that most programs do not:
//   before 2.15  the CPU's fused SGD loses steps of 16-bit parameters (detail/optim/kernels.h)
//   before 2.12  kinds of a thread's slot are an 8-bit enum (detail/overlay/runtime.h)
//   before 2.11  c10d's Reducer takes other arguments (detail/distributed/reducer.h); no table of
//                what the CPU can do; LibTorch's cache keeps casts that were made without
//                gradients, and gives them to a later forward of the region, whose gradients are
//                lost: begin another region for evaluation, as TrainingStep::evaluate does. Of
//                some, a graph has no pool of the host's memory (detail/graph/make_recorder.h)
//   before 2.10  a gradient has no dtype of its own (detail/recompute/cuts.h)
//   before 2.9   an op's kernel is found on a way of its own (detail/overlay/kernel.h); a capture
//                begins with what lies idle in the device's cache (detail/graph/recorder.h)
//   before 2.8   no 4-bit dtype; Adagrad's kernel takes no learning rate on the device
//                (detail/optim/kernels.h); a store by libuv takes no socket that listens already
//                (distributed/process_group.h)
//   before 2.7   no namespace at::accelerator, no list of autocast's devices
// The lists of autocast are each version's own: see libtorch_cuda_lists().

/// @cond
/// The LibTorch that is compiled against: 215 for 2.15.
#define TORCHAMP_LIBTORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if TORCHAMP_LIBTORCH < 206
#error "torchamp needs LibTorch 2.6 or later."
#endif
/// @endcond

namespace torchamp::detail {

/// The types of device that have autocast.
#if TORCHAMP_LIBTORCH >= 207
inline constexpr const auto& autocast_devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
#else
inline constexpr std::array autocast_devices{at::kCPU, at::kCUDA, at::kXPU,         at::kIPU,
                                             at::kHPU, at::kXLA,  at::kPrivateUse1, at::kMPS};
#endif

/// The type of the machine's accelerator, if LibTorch has one.
inline std::optional<c10::DeviceType> accelerator() {
#if TORCHAMP_LIBTORCH >= 207
  return at::accelerator::getAccelerator();
#else
  return at::getAccelerator();
#endif
}

}  // namespace torchamp::detail
