// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <concepts>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/scaler/misuse.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Records the clip for a scaler that has scaled these gradients, and for a step that finds that
/// there were none yet. Not for a limit of infinity, by which programs look at norms.
inline void note_clip(at::TensorList params) {
  const at::Tensor* none = nullptr;
  for (const at::Tensor& param : params) {
    if (!param.defined()) continue;
    const at::Tensor& gradient = gradient_of(param);
    if (gradient.defined()) return PlainClips::note(gradient);
    if (!none) none = &param;
  }
  if (none) PlainClips::note(*none);
}
inline void note_clip(const torch::optim::Optimizer& optimizer, bool knows_scale = false) {
  const bool any = any_gradient(optimizer, [=](const at::Tensor& gradient) {
    PlainClips::note(gradient, knows_scale);
    return true;
  });
  if (!any && !optimizer.param_groups().empty()) {
    note_clip(optimizer.param_groups().front().params());
  }
}

}  // namespace torchamp::detail

// Note [LibTorch's own clips]
// A program that clips scaled gradients by torch::nn::utils::clip_grad_norm_ limits the scaled
// norm, which is the most frequent mistake of all. LibTorch's function writes to the gradients'
// data(), so neither their versions nor a hook tell. So where clip_grad.h is included, a call with
// a vector that is not const means one of the overloads below, which match better: they call
// LibTorch's function, which does what it always does, and tell PlainClips
// of it.

namespace torch::nn::utils {

/// LibTorch's clip_grad_norm_, recorded for the scaler.
template <class Tensors, class... Rest>
requires std::same_as<std::remove_reference_t<Tensors>, std::vector<at::Tensor>>
double clip_grad_norm_(Tensors&& parameters, double max_norm, Rest... rest) {
  const double norm = clip_grad_norm_(std::as_const(parameters), max_norm, rest...);
  if (std::isfinite(max_norm)) torchamp::detail::note_clip(parameters);
  return norm;
}
/// LibTorch's clip_grad_value_, recorded for the scaler.
template <class Tensors>
requires std::same_as<std::remove_reference_t<Tensors>, std::vector<at::Tensor>>
void clip_grad_value_(Tensors&& parameters, double clip_value) {
  clip_grad_value_(std::as_const(parameters), clip_value);
  torchamp::detail::note_clip(parameters);
}

}  // namespace torch::nn::utils
