// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. ScaledStep and CapturedStep: interfaces of optimizers that step without reading the
/// device.

#include <ATen/core/Tensor.h>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// Interface of an optimizer that takes the scale and the overflow flag on the device.
/// GradScaler::step finds it with dynamic_cast, and then does not synchronise.
class ScaledStep {
 public:
  virtual ~ScaledStep() = default;

  /// Steps once, with every gradient divided by `grad_scale`, unless `found_inf` is non-zero.
  ///
  /// `grad_scale` and `found_inf` are 0-dim fp32 tensors on any device; the optimizer copies them
  /// to its parameters' devices and keeps no reference. If `grad_scale` is undefined, the gradients
  /// are not scaled (GradScaler::unscale_ has run); if `found_inf` is undefined, the step is always
  /// taken. A factor that the optimizer holds for this step, such as a clip's, is multiplied in and
  /// then dropped.
  ///
  /// A skipped step leaves parameters and optimizer state as if it had not been tried, also the
  /// very first. The device decides: this function never synchronises. The gradients may or may not
  /// be left divided by `grad_scale`.
  ///
  /// Returns what step() without a closure returns, in general an undefined tensor.
  virtual at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;
};

/// Interface, besides ScaledStep, of an optimizer whose step in a CUDA graph follows changes by the
/// host. CudaGraph finds it with dynamic_cast.
class CapturedStep {
 public:
  virtual ~CapturedStep() = default;

  /// Called outside the graph: before each eager step that precedes a capture, before the capture,
  /// and before each replay. From the first call on, steps read values that may change (learning
  /// rates) from the device, and each call writes them there.
  ///
  /// Returns whether the next step equals the last one since the first call, if any, in all else,
  /// and creates nothing that outlives it: false after state was loaded or an option changed.
  virtual bool prepare_captured_step() = 0;

  /// Whether prepare_captured_step() has been called, so graphs may replay steps.
  virtual bool may_be_captured() const = 0;

  /// Records that a replay has taken a step, which the host does not see otherwise. Not called for
  /// the first replay after a capture: the capture counts as its step.
  virtual void note_replayed_step() = 0;
};

}  // namespace TORCHAMP_NAMESPACE
