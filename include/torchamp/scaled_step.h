// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. ScaledStep and CapturedStep: interfaces of optimizers that step without reading the
/// device.

#include <ATen/core/Tensor.h>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// Interface of an optimizer that takes the scale and the overflow flag on the device.
/// GradScaler::step detects it by dynamic_cast, and then does not synchronise.
class ScaledStep {
 public:
  virtual ~ScaledStep() = default;

  /// Steps once, with every gradient divided by `grad_scale`, unless `found_inf` is non-zero.
  ///
  /// `grad_scale` and `found_inf` are 0-dim fp32 tensors on any device; the optimizer copies them
  /// to its parameters' devices and keeps no reference. If `grad_scale` is undefined, the gradients
  /// are not scaled (GradScaler::unscale_ has run); if `found_inf` is undefined, the step is always
  /// taken. If the optimizer holds a factor for this step, such as a clip's, it applies the factor
  /// and then drops it.
  ///
  /// A skipped step leaves parameters and optimizer state unchanged, even if it is the first step.
  /// The device decides: this function never synchronises. Afterwards the gradients may or may not
  /// be divided by `grad_scale`.
  ///
  /// Returns what step() without a closure returns, in general an undefined tensor.
  virtual at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;
};

/// A second interface of such an optimizer: its steps in a CUDA graph use values that the host
/// changes later, such as learning rates. CudaGraph detects it by dynamic_cast.
class CapturedStep {
 public:
  virtual ~CapturedStep() = default;

  /// CudaGraph calls this outside the graph: before each eager step that precedes a capture, before
  /// the capture, and before each replay. From the first call on, steps read values that may change
  /// (learning rates) from the device, and each call writes these values to the device.
  ///
  /// Returns true if the next step allocates nothing that outlives it, and does the same work as
  /// the previous step, apart from these values. If no step was taken since the first call, the
  /// work counts as the same. Returns false after state was loaded or an option changed.
  virtual bool prepare_captured_step() = 0;

  /// Whether prepare_captured_step() has been called: only then graphs may replay steps.
  virtual bool may_be_captured() const = 0;

  /// Records that a replay has taken a step, because a replay runs no host code. CudaGraph does not
  /// call it for the first replay after a capture: the capture has already counted that step.
  virtual void note_replayed_step() = 0;
};

}  // namespace TORCHAMP_NAMESPACE
