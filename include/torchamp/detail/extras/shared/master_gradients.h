// SPDX-License-Identifier: BSD-3-Clause
// From the gradients of a model's 16-bit weights to the fp32 gradients that an optimizer steps
// with.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/tensor_pairs.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Laid out as `weight`.
inline at::Tensor empty_fp32_like(const at::Tensor& weight) {
  return at::empty_like(weight, weight.options().dtype(at::kFloat).requires_grad(false));
}

/// Adds `gradient`, of 16 bits, to `sum`, in fp32 and laid out as `like`.
inline void add_to_main(at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& like) {
  if (gradient.layout() != at::kStrided) {
    sum = sum.defined() ? sum + gradient.to(at::kFloat) : gradient.to(at::kFloat);
  } else if (!sum.defined()) {
    sum = empty_fp32_like(like).copy_(gradient);
  } else if (sum.layout() != at::kStrided) {
    sum = gradient.to(at::kFloat) + sum;
  } else {
    sum.add_(gradient);
  }
}

/// A weight of the model, and the optimizer's parameter that gets its gradient: the master, or the
/// weight itself if it is split.
struct MovedGradient {
  at::Tensor weight, owner;
  at::Tensor sum = {};  // in fp32: the owner's gradient, plus the weight's
};

/// Adds the gradients of weights to the owners' gradients, in fp32, and clears them. Skips weights
/// without a gradient, and split weights whose gradient is already fp32. Returns whether any was
/// moved. If it throws, the model still has its gradients.
inline bool move_gradients(std::vector<MovedGradient> gradients) {
  std::erase_if(gradients, [](const MovedGradient& one) {
    const at::Tensor& gradient = gradient_of(one.weight);
    return !gradient.defined() ||
           (one.owner.is_same(one.weight) && gradient.scalar_type() == at::kFloat);
  });
  TensorPairs copies, sums;  // a few launches for all
  for (MovedGradient& one : gradients) {
    const at::Tensor gradient = gradient_of(one.weight);
    if (!one.owner.is_same(one.weight)) one.sum = one.owner.grad();
    const bool are_dense = gradient.layout() == at::kStrided &&
                           (!one.sum.defined() || one.sum.layout() == at::kStrided);
    if (!are_dense) {
      add_to_main(one.sum, gradient, one.owner);
      continue;
    }
    const at::Tensor wide = empty_fp32_like(one.owner);
    copies.add(wide, gradient);
    one.sum.defined() ? sums.add(one.sum, wide) : void(one.sum = wide);
  }
  copies.copy();
  sums.accumulate();
  if (gradients.empty()) return false;
  const uint64_t times = ++gradients_moved();
  for (MovedGradient& one : gradients) {
    if (WeightMeta* const meta = weight_meta_of(one.owner)) meta->note_gradient_taken(times);
    one.weight.mutable_grad().reset();
    one.owner.mutable_grad() = std::move(one.sum);
  }
  return true;
}

/// Moves the gradients of the model whose masters the optimizer steps, as
/// MasterWeights::take_gradients() does.
inline void take_model_gradients(const torch::optim::Optimizer& optimizer) {
  const InternalOps guard;
  std::vector<MovedGradient> gradients;
  any_parameter(optimizer, [&](const at::Tensor& parameter) {
    const at::Tensor narrow = narrow_of(parameter);
    const bool is_split = is_16_bit(parameter.scalar_type()) && step_dtype(parameter) == at::kFloat;
    if (narrow.defined() || is_split) {
      gradients.push_back({is_split ? parameter : narrow, parameter});
    }
    return false;
  });
  (void)move_gradients(std::move(gradients));
}

}  // namespace TORCHAMP_NAMESPACE::detail
