// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <utility>

#include "torchamp/detail/brought_to.h"
#include "torchamp/detail/internal_ops.h"
#include "torchamp/scaled_step.h"

namespace torchamp {

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

  /// Divides the gradients that are there now by `divisor` (0-dim fp32, on any device) when they
  /// are next stepped with, on top of the scale and of earlier divisors, at the cost of one
  /// multiplication of two numbers. clip_grad_norm_ uses it. The gradients themselves are not
  /// changed before that step. A divisor whose gradients were dropped before a step (zero_grad()
  /// does so by default) is forgotten with them. Never reads the device.
  void divide_next_step(const at::Tensor& divisor) {
    TORCH_CHECK_VALUE(divisor.defined(), "FusedOptimizer::divide_next_step: no divisor was given.");
    check_scalar(divisor, "divisor");
    const detail::InternalOps internal;
    divisor_ = times(next_step_divisor(), divisor);
    divided_ = first_gradient();
  }

  /// What divide_next_step left for the next step; undefined if there is nothing. Never reads the
  /// device.
  at::Tensor next_step_divisor() const {
    return divisor_.defined() && divided_ == first_gradient() ? divisor_ : at::Tensor();
  }

  /// The same, and leaves nothing for the next step.
  at::Tensor take_next_step_divisor() {
    at::Tensor divisor = next_step_divisor();
    divisor_.reset();
    divided_.reset();
    return divisor;
  }

 protected:
  using Optimizer::Optimizer;

  virtual void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  void step_divided(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
    const detail::InternalOps internal;
    step_fused(times(grad_scale, next_step_divisor()), found_inf);
    take_next_step_divisor();
  }

  static void check_scalar(const at::Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(
        !tensor.defined() || (tensor.dim() == 0 && tensor.scalar_type() == at::kFloat),
        "FusedOptimizer: ", name, " is of dtype ", tensor.scalar_type(), " and shape ",
        tensor.sizes(), ". It must be a 0-dim fp32 tensor.");
  }

  // The product of two numbers on the device of the first; an undefined one counts as 1.
  static at::Tensor times(const at::Tensor& a, const at::Tensor& b) {
    if (!a.defined()) return b;
    if (!b.defined()) return a;
    return a.mul(detail::brought_to(a.device(), b));
  }

  // Holds no gradient alive. While it exists, no other tensor can have that one's address.
  WeakTensor first_gradient() const {
    for (const auto& group : param_groups()) {
      for (const at::Tensor& param : group.params()) {
        const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
        if (grad.defined()) return WeakTensor(grad.getIntrusivePtr());
      }
    }
    return WeakTensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>());
  }

  at::Tensor divisor_;
  WeakTensor divided_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

}  // namespace torchamp
