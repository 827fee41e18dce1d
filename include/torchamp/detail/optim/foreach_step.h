// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsub.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [Steps without a fused kernel]
// Where a device has no fused kernel that heeds the scale and the flag, the step consists of
// _foreach_ ops, which take the lists in one go, too, and reads nothing either. Gradients are
// copied into one piece, divided, and zeroed if the step is skipped, so that all that follows is
// finite; what is added to parameters and states is then multiplied by 0. 16-bit numbers are
// stepped in fp32 copies. For one list that takes some 30 launches instead of one, 15 to 20 of
// which go over all parameters, and memory for two or three copies of the gradients meanwhile.

/// The lists of one step as `_foreach_` ops are to take them, and 0-dim tensors to scale them by.
class ForeachStep {
 public:
  std::vector<at::Tensor> params, grads;       ///< with at least the precision of fp32
  std::vector<std::vector<at::Tensor>> state;  ///< by kind
  at::Tensor taken;  ///< 1, or 0 if the step is skipped; as all numbers here, fp64 if those are

  ForeachStep(const StepList& list, const StepScalars& scalars)
      : params(list.params), state(list.state), list_(list) {
    if (is_16_bit(list.dtype)) {
      widen(params);
      for (auto& tensors : state) widen(tensors);
    }
    taken = scalars.found_inf() ? at::rsub(*scalars.found_inf(), 1.) : scalars.one();
    if (list.dtype == at::kDouble) taken = taken.to(at::kDouble);
    take_gradients(scalars);
  }

  /// 1 if the step is skipped: keeps denominators from being 0 then.
  at::Tensor skipped() const { return at::rsub(taken, 1.); }

  /// How often the parameters have been stepped, this step included unless it is skipped.
  at::Tensor count() const { return list_.counter->value.to(taken.scalar_type()); }

  /// The learning rate, or 0 if the step is skipped.
  at::Tensor rate_if_taken(double rate) const {
    return list_.rate.defined() ? taken.mul(list_.rate) : taken.mul(rate);
  }

  /// Adds `weight` times the parameters to the gradients.
  void decay(double weight) {
    if (weight != 0.) at::_foreach_add_(grads, params, weight);
  }

  /// Moves each of `tensors` towards its target, `weight` of the way; changes the targets.
  static void move(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& targets,
                   const at::Tensor& weight) {
    at::_foreach_add_(targets, tensors, -1.);
    at::_foreach_mul_(targets, weight);
    at::_foreach_add_(tensors, targets);
  }

  /// Subtracts `rate` times `direction`, which it changes, from the parameters.
  void descend(const std::vector<at::Tensor>& direction, const at::Tensor& rate) {
    at::_foreach_mul_(direction, rate);
    at::_foreach_add_(params, direction, -1.);
  }

  /// Gives the optimizer what has become of its parameters and states.
  void store() const {
    if (!is_16_bit(list_.dtype)) return;
    at::_foreach_copy_(list_.params, params);
    for (std::size_t k = 0; k < state.size(); ++k) at::_foreach_copy_(list_.state[k], state[k]);
  }

 private:
  static void widen(std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> wide;
    wide.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      wide.push_back(at::empty_like(tensor, tensor.options().dtype(at::kFloat)));
    }
    at::_foreach_copy_(wide, tensors);
    tensors = std::move(wide);
  }

  void take_gradients(const StepScalars& scalars) {
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& grad : list_.grads)
      pieces.push_back(grad.as_strided({grad.numel()}, {1}));
    at::Tensor all = at::cat(pieces);
    all = all.to(taken.scalar_type());
    if (scalars.grad_scale()) all.div_(*scalars.grad_scale());
    if (scalars.found_inf()) all.masked_fill_(scalars.found_inf()->to(at::kBool), 0.);
    int64_t offset = 0;
    for (const at::Tensor& grad : list_.grads) {
      grads.push_back(all.as_strided(grad.sizes(), grad.strides(), offset));
      offset += grad.numel();
    }
  }

  const StepList& list_;
};

}  // namespace torchamp::detail
