// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What an optimizer implements, beside torch::optim::Optimizer, to take the scale and the overflow
/// flag on the device. GradScaler::step finds it with dynamic_cast and then reads nothing.
class ScaledStep {
 public:
  virtual ~ScaledStep() = default;

  /// Steps once, with every gradient divided by `grad_scale`, unless `found_inf` is non-zero.
  ///
  /// `grad_scale` and `found_inf` are 0-dim fp32 tensors, on any device; the optimizer copies them
  /// to its parameters' devices as needed and keeps no reference to either. An undefined
  /// `grad_scale` means that the gradients are not scaled (GradScaler::unscale_ has run), an
  /// undefined `found_inf` that the step is to be taken whatever the gradients hold. A factor that
  /// the optimizer holds for this one step, from a clip, say, is multiplied in and spent.
  ///
  /// A step that is not taken leaves parameters and optimizer state as if it had never been tried,
  /// on the very first one too. Whether it is taken is decided on the device: this never reads it.
  /// The gradients may be left divided by `grad_scale` or not.
  ///
  /// Returns what step() without a closure returns: an undefined tensor, in general.
  virtual at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;
};

}  // namespace TORCHAMP_NAMESPACE
