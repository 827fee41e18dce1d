// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/flatten_dense_tensors.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"
#include "torchamp/detail/core/gradients/separate.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The gradients of all parameters, each once and in its own memory, by device and dtype, sparse
/// gradients by their coalesced values, for kernels to change in place. `call` begins the error
/// texts. If this throws, every gradient has its previous value.
inline std::vector<GradientBatch> gradients_to_clip(const std::vector<at::TensorList>& lists,
                                                    const char* call) {
  std::vector<GradientBatch> batches;
  std::size_t count = 0;
  GradientSeparator separator;
  for (const at::TensorList params : lists) {
    count += params.size();
    for (const at::Tensor& parameter : params) {
      if (parameter.defined()) separator.add(parameter);
    }
  }
  separator.separate();
  SeenGradients seen;
  seen.reserve(count);
  for (const at::TensorList params : lists) {
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!params[i].defined()) continue;
      at::Tensor gradient = gradient_of(params[i]);
      if (!gradient.defined()) continue;
      if (gradient.is_sparse() && !gradient.is_coalesced()) {
        params[i].mutable_grad() = gradient = gradient.coalesce();
      } else if (gradient.is_conj() || gradient.is_neg()) {
        params[i].mutable_grad() = gradient = resolved(gradient);
      }
      if (!seen.insert(gradient.unsafeGetTensorImpl()).second) continue;
      if (gradient.is_sparse()) gradient = gradient._values();
      TORCHAMP_CHECK_VALUE(
          gradient.layout() == at::kStrided && !repeats_elements(gradient), call,
          ": the gradient of parameter ", i, ' ', params[i].sizes(), " has the layout ",
          gradient.layout(), " and strides ", gradient.strides(),
          ". Gradients must be dense or sparse COO, and their elements must not share memory: ",
          "give .grad a clone().");
      if (gradient.numel() == 0) continue;
      group_of(batches, TensorKind::of(gradient)).gradients.push_back(std::move(gradient));
    }
  }
  return batches;
}

/// The tensors whose norms are computed: the gradients. On the host a call costs more than a small
/// gradient, so small gradients form one vector there.
inline std::vector<at::Tensor> parts_of_norm(const GradientBatch& batch, double norm_type) {
  constexpr int64_t small_size = 1024;
  if (!batch.device.is_cpu() || norm_type == 0.) return batch.gradients;
  std::vector<at::Tensor> parts, joined;
  for (const at::Tensor& gradient : batch.gradients) {
    (gradient.numel() <= small_size ? joined : parts).push_back(gradient);
  }
  if (!joined.empty()) parts.push_back(at::flatten_dense_tensors(joined));
  return parts;
}

/// fp64 if a gradient has that precision, fp32 otherwise: 16 bits could not hold a norm.
inline at::ScalarType norm_dtype(const std::vector<GradientBatch>& batches) {
  for (const GradientBatch& batch : batches) {
    if (c10::toRealValueType(batch.dtype) == at::kDouble) return at::kDouble;
  }
  return at::kFloat;
}

/// The dtype in which the norm of a batch is summed, if it is not the batch's dtype.
inline std::optional<at::ScalarType> sum_dtype(at::ScalarType dtype, bool in_fp64) {
  if (in_fp64) return c10::isComplexType(dtype) ? at::kComplexDouble : at::kDouble;
  if (is_16_bit(dtype)) return at::kFloat;
  return std::nullopt;
}

/// The norm of all gradients as one vector: 0-dim, in norm_dtype(), on the first one's device; if
/// `in_fp64`, summed up and returned in fp64.
inline at::Tensor total_norm(const std::vector<GradientBatch>& batches, double norm_type,
                             bool in_fp64 = false) {
  if (batches.empty()) return at::zeros({}, at::kFloat);
  std::vector<at::Tensor> norms;
  const at::ScalarType dtype = in_fp64 ? at::kDouble : norm_dtype(batches);
  for (const GradientBatch& batch : batches) {
    const std::vector<at::Tensor> parts = parts_of_norm(batch, norm_type);
    const std::vector<at::Tensor> of_parts =
        at::_foreach_norm(parts, norm_type, sum_dtype(batch.dtype, in_fp64));
    norms.push_back(to_device_async(batches[0].device, at::stack(of_parts)));
  }
  for (at::Tensor& norm : norms) norm = norm.to(dtype);
  return at::linalg_vector_norm(norms.size() == 1 ? norms[0] : at::cat(norms), norm_type);
}

// Note [Norms of scaled gradients]
// The squares of scaled gradients, and their sums, may be outside of fp32's range although no
// gradient is. The norm must still be exactly the norm of the unscaled gradients:
//   sums and squares    in fp64, which can hold them for all fp32 numbers. A GPU computes them
//                       while it waits for memory. A CPU must copy first, so there the sum is made
//                       in fp32, and, if the result is at an end of fp32's range, again in fp64.
//   maxima, minima      of the scaled gradients
//   nonzero gradients   counted without a division by the scale
//   any other norm      of copies divided by the scale, because powers may leave fp64's range. So
//                       are sums and squares on devices that are not known to have fp64.
// This takes one pass over the gradients; two if a CPU sums a second time, or if copies are
// divided.

/// Whether fp32 could hold the squares from which this norm was computed, on the host.
inline bool is_reliable(const at::Tensor& norm) {
  const double value = norm.scalar_type() == at::kDouble ? *norm.const_data_ptr<double>()
                                                         : *norm.const_data_ptr<float>();
  return value >= 0x1p-40 && value <= std::numeric_limits<double>::max();
}

/// Copies divided by `scale`, with at least the precision of fp32.
inline std::vector<GradientBatch> divided(const std::vector<GradientBatch>& batches,
                                          const at::Tensor& scale) {
  std::vector<GradientBatch> result;
  for (const GradientBatch& batch : batches) {
    std::vector<at::Tensor> wide = batch.gradients;
    const at::ScalarType dtype = sum_dtype(batch.dtype, false).value_or(batch.dtype);
    for (at::Tensor& gradient : wide) gradient = gradient.to(dtype);
    const at::Tensor here = to_device_async(batch.device, scale).to(c10::toRealValueType(dtype));
    result.push_back({{batch.device, dtype}, at::_foreach_div(wide, here)});
  }
  return result;
}

/// The norm that the gradients would have if they were divided by `scale` and by `divisor`, two
/// 0-dim tensors of which one may be undefined. Otherwise like total_norm().
inline at::Tensor total_norm_divided(const std::vector<GradientBatch>& batches, double norm_type,
                                     const at::Tensor& scale, const at::Tensor& divisor) {
  if (batches.empty() || norm_type == 0.) return total_norm(batches, norm_type);
  bool on_host = true, have_fp64 = true;
  for (const GradientBatch& batch : batches) {
    on_host = on_host && batch.device.is_cpu();
    have_fp64 = have_fp64 && facts_of(batch.device.type()).fp64 == Fp64::yes;
  }
  const bool sums = norm_type == 1. || norm_type == 2.;
  at::Tensor norm;
  if (std::isinf(norm_type)) {
    norm = total_norm(batches, norm_type);
  } else if (sums && on_host) {
    norm = total_norm(batches, norm_type);
    if (!is_reliable(norm)) norm = total_norm(batches, norm_type, /*in_fp64=*/true);
  } else if (sums && have_fp64) {
    norm = total_norm(batches, norm_type, /*in_fp64=*/true);
  } else {
    norm = total_norm(scale.defined() ? divided(batches, scale) : batches, norm_type);
    if (divisor.defined()) norm.div_(to_device_async(norm.device(), divisor));
    return norm;
  }
  const at::ScalarType dtype = norm_dtype(batches);
  for (const at::Tensor& number : {scale, divisor}) {
    if (!number.defined()) continue;
    // Directly to the norm's own dtype, unless it is divided again.
    const bool again = number.is_same(scale) && divisor.defined();
    at::Tensor quotient = at::empty({}, norm.options().dtype(again ? norm.scalar_type() : dtype));
    at::div_out(quotient, norm, to_device_async(norm.device(), number));
    norm = std::move(quotient);
  }
  return norm.to(dtype);
}

}  // namespace TORCHAMP_NAMESPACE::detail
