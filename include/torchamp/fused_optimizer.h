// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include "torchamp/detail/internal_ops.h"
#include "torchamp/detail/optim/pending_divisor.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What the fused optimizers (optim.h) have in common: torch::optim::Optimizers that step all
/// parameters of a group, device and dtype with one call of ATen's fused kernel, and that decide on
/// the device whether a step is taken. Neither step() nor step_scaled() ever reads the device.
///
/// Not for use by several threads at once.
class FusedOptimizer : public torch::optim::Optimizer, public ScaledStep {
 public:
  /// As torch::optim::Optimizer::step: runs the closure, if there is one, with gradients enabled,
  /// steps, and returns the closure's value or an undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      at::AutoGradMode with_gradients(true);
      loss = closure();
    }
    step_divided(at::Tensor(), at::Tensor());
    return loss;
  }

  at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override {
    check_scalar(grad_scale, "grad_scale");
    check_scalar(found_inf, "found_inf");
    step_divided(grad_scale, found_inf);
    return {};
  }

  /// As torch::optim::Optimizer::zero_grad; also forgets what divide_next_step has left.
  void zero_grad(bool set_to_none = true) {
    pending_.forget();
    Optimizer::zero_grad(set_to_none);
  }

  /// Divides the gradients that are there now by `divisor` (0-dim fp32, on any device) when they
  /// are next stepped with, on top of the scale and of earlier divisors, at the cost of one
  /// multiplication of two numbers. clip_grad_norm_ uses it. The gradients themselves are not
  /// changed before that step. A divisor whose gradients were all dropped before a step
  /// (zero_grad() does so by default) is forgotten with them. Gradients that were written to,
  /// replaced, added or dropped in part make the step an error; see Note [What was clipped is what
  /// is stepped]. Never reads the device.
  void divide_next_step(const at::Tensor& divisor) {
    TORCH_CHECK_VALUE(divisor.defined(), "FusedOptimizer::divide_next_step: no divisor was given.");
    check_scalar(divisor, "divisor");
    const detail::InternalOps internal;
    pending_.add(param_groups(), divisor);
  }

  /// What divide_next_step left for the next step; undefined if there is nothing. An error if it
  /// was left for other gradients than there are now. Never reads the device.
  at::Tensor next_step_divisor() const { return pending_.of(param_groups()); }

  /// The same, and leaves nothing for the next step; what was left for other gradients than there
  /// are now is forgotten.
  at::Tensor take_next_step_divisor() {
    at::Tensor divisor = pending_.is_for(param_groups()) ? next_step_divisor() : at::Tensor();
    pending_.forget();
    return divisor;
  }

 protected:
  using Optimizer::Optimizer;

  virtual void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;

 private:
  void step_divided(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
    const detail::InternalOps internal;
    const at::Tensor divisor = pending_.for_step(param_groups());
    step_fused(detail::PendingDivisor::times(grad_scale, divisor), found_inf);
    pending_.forget();
  }

  static void check_scalar(const at::Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(
        !tensor.defined() || (tensor.dim() == 0 && tensor.scalar_type() == at::kFloat),
        "FusedOptimizer: ", name, " is of dtype ", tensor.scalar_type(), " and shape ",
        tensor.sizes(), ". It must be a 0-dim fp32 tensor.");
  }

  detail::PendingDivisor pending_;
};

}  // namespace TORCHAMP_NAMESPACE
