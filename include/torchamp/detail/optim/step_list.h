// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/counters.h"

namespace torchamp::detail {

/// Whether two tensors hold their elements in the same order: the fused kernels walk through memory
/// and do not look (on the CPU not even for an error).
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

inline bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.device() == b.device() && a.scalar_type() == b.scalar_type();
}

/// `tensor`, or a copy of it with the device, dtype and layout of `param`.
inline at::Tensor fitted(const at::Tensor& tensor, const at::Tensor& param) {
  const bool fits = same_kind(tensor, param) && same_layout(tensor, param) && !tensor.is_neg();
  if (fits) return tensor;
  at::Tensor copy = at::empty_like(param);
  copy.copy_(tensor);
  return copy;
}

/// The parameters that one call of a fused kernel steps: those of one group, device and dtype that
/// have a gradient. Kept from step to step; the gradients are not.
struct StepList {
  std::size_t group;
  at::Device device;
  at::ScalarType dtype;
  std::size_t scalars;                   ///< the index of the device's StepScalars
  std::shared_ptr<StepCounter> counter;  ///< for kernels that want one count for all parameters
  std::vector<at::Tensor> params, grads;
  std::vector<at::Tensor> counters;            ///< one for each parameter, shared or not
  std::vector<std::vector<at::Tensor>> state;  ///< by kind of state, then by parameter

  /// The learning rate where a captured step reads it (0-dim fp32), and what was last written
  /// there; undefined where steps are not captured.
  at::Tensor rate{};
  double written_rate = 0.;
};

}  // namespace torchamp::detail
