// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/flatten_dense_tensors.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/brought_to.h"
#include "torchamp/detail/gradients.h"

namespace torchamp::detail {

/// The gradients of `params` by device and dtype, sparse ones by their coalesced values, for
/// kernels to change in place. `call` begins the error texts; nothing has been changed then, except
/// that sparse gradients before the one in question are coalesced.
inline std::vector<GradientBatch> gradients_to_clip(at::TensorList params, const char* call,
                                                    std::vector<GradientBatch> batches = {}) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].defined()) continue;
    at::Tensor gradient = params[i].unsafeGetTensorImpl()->grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) {
      if (!gradient.is_coalesced()) params[i].mutable_grad() = gradient = gradient.coalesce();
      gradient = gradient._values();
    }
    TORCH_CHECK_VALUE(gradient.layout() == at::kStrided &&
                          at::has_internal_overlap(gradient) != at::MemOverlap::Yes,
                      call, ": the gradient of parameter ", i, ' ', params[i].sizes(),
                      " has the layout ", gradient.layout(), " and strides ", gradient.strides(),
                      ". Gradients are dense or sparse COO, and their elements share no memory: "
                      "give .grad a clone().");
    if (gradient.numel() == 0) continue;
    std::size_t b = 0;
    while (b < batches.size() &&
           (batches[b].device != gradient.device() || batches[b].dtype != gradient.scalar_type())) {
      ++b;
    }
    if (b == batches.size()) batches.push_back({gradient.device(), gradient.scalar_type(), {}});
    batches[b].gradients.push_back(std::move(gradient));
  }
  return batches;
}

inline std::vector<GradientBatch> gradients_to_clip(torch::optim::Optimizer& optimizer,
                                                    const char* call) {
  std::vector<GradientBatch> batches;
  for (const auto& group : optimizer.param_groups()) {
    batches = gradients_to_clip(group.params(), call, std::move(batches));
  }
  return batches;
}

/// What to take the norms of: the gradients; on the host, where a call costs more than a small
/// gradient, the small ones as one vector.
inline std::vector<at::Tensor> parts_of_norm(const GradientBatch& batch, double norm_type) {
  constexpr int64_t small_size = 1024;
  if (!batch.device.is_cpu() || norm_type == 0.) return batch.gradients;
  std::vector<at::Tensor> parts, small;
  for (const at::Tensor& gradient : batch.gradients) {
    (gradient.numel() <= small_size ? small : parts).push_back(gradient);
  }
  if (!small.empty()) parts.push_back(at::flatten_dense_tensors(small));
  return parts;
}

/// The norm of all gradients as one vector: 0-dim, fp64 if one of them has that precision and fp32
/// otherwise (16 bits could not hold it), on the first one's device.
inline at::Tensor total_norm(const std::vector<GradientBatch>& batches, double norm_type) {
  if (batches.empty()) return at::zeros({}, at::kFloat);
  std::vector<at::Tensor> norms;
  at::ScalarType widest = at::kFloat;
  for (const GradientBatch& batch : batches) {
    const bool narrow = batch.dtype == at::kHalf || batch.dtype == at::kBFloat16;
    const at::Tensor norm = at::stack(at::_foreach_norm(
        parts_of_norm(batch, norm_type), norm_type,
        narrow ? std::optional<at::ScalarType>(at::kFloat) : std::optional<at::ScalarType>()));
    widest = c10::promoteTypes(widest, norm.scalar_type());
    norms.push_back(brought_to(batches[0].device, norm));
  }
  for (at::Tensor& norm : norms) norm = norm.to(widest);
  return at::linalg_vector_norm(norms.size() == 1 ? norms[0] : at::cat(norms), norm_type);
}

/// Multiplies all gradients in place by a 0-dim tensor: one kernel for each device and dtype.
inline void multiply(const std::vector<GradientBatch>& batches, const at::Tensor& factor) {
  for (const GradientBatch& batch : batches) {
    const at::Tensor here = brought_to(batch.device, factor);
    const bool unscales =
        (batch.device.is_cpu() || batch.device.is_cuda()) &&
        (batch.dtype == at::kFloat || batch.dtype == at::kHalf || batch.dtype == at::kBFloat16);
    if (unscales) {  // the quickest multiplication there is, with a factor in fp32
      at::Tensor unused = at::zeros({}, at::TensorOptions(batch.device).dtype(at::kFloat));
      at::_amp_foreach_non_finite_check_and_unscale_(batch.gradients, unused, here.to(at::kFloat));
    } else {
      at::_foreach_mul_(batch.gradients, here);
    }
  }
}

}  // namespace torchamp::detail
