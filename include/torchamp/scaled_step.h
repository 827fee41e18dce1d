// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief What an optimizer implements to be stepped, and captured, without a read of the device.

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

/// What an optimizer implements, beside ScaledStep, so that a CUDA graph that holds its step
/// follows what the host changes. CudaGraph finds it with dynamic_cast.
class CapturedStep {
 public:
  virtual ~CapturedStep() = default;

  /// Called outside of the graph: before each eager step that precedes a capture, before the
  /// capture, and before each replay. From the first call on, steps read from the device what may
  /// change from one to the next (learning rates), and each call writes it there.
  ///
  /// Returns whether the next step will be like the last one since the first call, if there was
  /// one, in all else, and makes nothing that outlives it: false when state was loaded or an option
  /// changed.
  virtual bool prepare_captured_step() = 0;

  /// Whether prepare_captured_step() has been called: graphs may replay steps and what comes with
  /// them.
  virtual bool may_be_captured() const = 0;

  /// Takes note that a graph's replay has made a step of which the host learns nothing else. Not
  /// for the first replay after a capture, for the capture counts as a step.
  virtual void note_replayed_step() = 0;
};

}  // namespace TORCHAMP_NAMESPACE
