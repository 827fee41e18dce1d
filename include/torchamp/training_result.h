// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. TrainingResult: the result of a TrainingStep's iteration.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// The result of a TrainingStep's iteration, or of finish().
///
///     const auto result = train([&] { return loss_of(batch); });
///     if (step % 100 == 0) std::cout << result.loss() << '\n';
///
/// A query synchronises with the device once, unless the host already has the value. A result that
/// is never queried costs nothing. With `.capture` the next iteration overwrites the tensors: query
/// before it. One thread at a time.
class TrainingResult {
 public:
  /// The loss that the function returned for this micro-batch. Synchronises. Error: a result of
  /// finish().
  double loss() const {
    TORCH_CHECK(loss_.defined(), "TrainingResult::loss: finish() computes no loss.");
    return loss_.item<double>();
  }
  /// The loss on its device, without its autograd graph. Never synchronises.
  const at::Tensor& loss_tensor() const { return loss_; }

  /// Whether this was the last micro-batch of a window, so that a step was taken or skipped. Never
  /// synchronises.
  bool ended_window() const { return step_.has_value(); }

  /// Whether the optimizer stepped. False before the end of a window. At its end, false if a
  /// gradient held an inf or a NaN, or if there was no gradient. Synchronises like
  /// StepResult::stepped().
  bool stepped() const { return step_ && step_->stepped(); }
  /// The same as stepped().
  explicit operator bool() const { return stepped(); }

  /// The norm of all unscaled gradients before clipping. Synchronises. Errors: no .max_grad_norm is
  /// set (infinity computes the norm and clips nothing); a result before the end of a window.
  double norm() const {
    TORCH_CHECK(norm_.defined(), "TrainingResult::norm: ",
                ended_window() ? "no norm was computed. Set .max_grad_norm; with infinity "
                                 "(std::numeric_limits<double>::infinity()) nothing is clipped."
                               : "the window has not ended, so its norm is not known. Query it at "
                                 "the end of a window (ended_window()).");
    return norm_.item<double>();
  }
  /// The norm on its device; undefined if norm() throws. Never synchronises.
  const at::Tensor& norm_tensor() const { return norm_; }

  /// The scale of the gradients; 1 for a disabled scaler. Synchronises like StepResult::scale().
  /// Error: a result before the end of a window.
  double scale() const {
    TORCH_CHECK(ended_window(),
                "TrainingResult::scale: the window has not ended, so there was no step. Call the "
                "TrainingStep's scaler().get_scale().");
    return step_->scale();
  }

  /// The result of GradScaler::step; none before the end of a window. Never synchronises.
  const std::optional<StepResult>& step_result() const { return step_; }

  /// The overflow flag on its device, like StepResult::found_inf(); undefined before the end of a
  /// window. Never synchronises.
  at::Tensor found_inf() const { return step_ ? step_->found_inf() : at::Tensor(); }

  /// The scale of the gradients on its device. Undefined before the end of a window, with a
  /// disabled scaler, and if neither `.capture` nor `.log` is set. Never synchronises.
  const at::Tensor& scale_tensor() const { return scale_; }

 private:
  friend class TrainingStep;
  TrainingResult(at::Tensor loss, std::optional<StepResult> step, at::Tensor norm, at::Tensor scale)
      : loss_(std::move(loss)),
        norm_(std::move(norm)),
        scale_(std::move(scale)),
        step_(std::move(step)) {}
  /// A result that shares the tensors, which replays of a graph overwrite, but not the values that
  /// were read.
  TrainingResult with_own_answers() const {
    TrainingResult result = *this;
    if (step_) result.step_ = detail::ScalerParts::with_own_answers(*step_);
    return result;
  }

  at::Tensor loss_, norm_, scale_;
  std::optional<StepResult> step_;
};

}  // namespace TORCHAMP_NAMESPACE
