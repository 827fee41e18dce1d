// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/separate.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Gradients of one device and dtype, for one batch kernel.
struct GradientBatch : TensorKind {
  std::vector<at::Tensor> gradients{};
};

/// Overflow flags on several devices, which are combined into one.
class DeviceFlags {
 public:
  explicit DeviceFlags(const at::Tensor& home) { flags_.push_back(home); }

  at::Tensor& on(at::Device device) {
    for (at::Tensor& flag : flags_) {
      if (flag.device() == device) return flag;
    }
    return flags_.emplace_back(at::zeros({}, flags_[0].options().device(device)));
  }

  /// Sets the first flag to 1 if any flag is 1. Reads no device. If the first flag is on the host,
  /// it waits for the others.
  void gather() {
    for (std::size_t i = 1; i < flags_.size(); ++i) {
      flags_[0].add_(to_device_async(flags_[0].device(), flags_[i])).clamp_max_(1.);
    }
  }

 private:
  std::vector<at::Tensor> flags_;
};

/// Whether fp16 gradients are an error: dividing them by the scale would lose small gradients
/// again.
enum class HalfGradients { refused, allowed };

/// The same values without the conjugate and the negative bit, which kernels that write in place
/// ignore.
inline at::Tensor resolved(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
}

/// A tensor in which kernels find all values of the gradient: the gradient itself, or a
/// replacement.
inline at::Tensor seen_whole(const at::Tensor& gradient, HalfGradients half_gradients) {
  if (gradient.is_sparse() && gradient.scalar_type() == at::kHalf &&
      half_gradients == HalfGradients::allowed && !gradient.is_coalesced()) {
    return gradient.coalesce();  // adding elements with the same index may overflow
  }
  return resolved(gradient);
}

/// Whether kernels take `gradient` unchanged.
inline bool is_plain(const at::Tensor& gradient) {
  const at::ScalarType dtype = gradient.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && gradient.layout() == at::kStrided &&
         gradient.is_non_overlapping_and_dense();
}

/// The dense strided tensor that holds all values of `gradient`, for kernels to change in place.
/// Throws for gradients that kernels cannot take; `where` names them.
inline at::Tensor values_of(const at::Tensor& gradient, HalfGradients half_gradients,
                            ErrorPlace where) {
  const at::ScalarType dtype = gradient.scalar_type();
  TORCHAMP_CHECK_VALUE(
      half_gradients == HalfGradients::allowed || dtype != at::kHalf, where(),
      " is fp16. Keep the parameters in fp32 and let AutocastGuard cast them: an fp16 gradient "
      "divided by the scale underflows. (A fused optimizer's step takes fp16 gradients.)");
  TORCHAMP_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble || is_16_bit(dtype) ||
                           dtype == at::kComplexFloat || dtype == at::kComplexDouble,
                       where(), " is ", dtype, ". Gradients must be fp32, fp64, bf16, or complex.");
  TORCHAMP_CHECK_VALUE(gradient.layout() == at::kStrided || gradient.is_sparse(), where(),
                       " has the layout ", gradient.layout(),
                       ". Gradients must be dense or sparse COO.");
  at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  if (values.is_complex()) values = at::view_as_real(values);
  TORCHAMP_CHECK_VALUE(
      !repeats_elements(values), where(),
      " is an expanded tensor, whose elements share memory. Give .grad a clone() of it.");
  return values;
}

/// The gradients that are already in a collection. If an optimizer has a parameter twice, as when a
/// model has registered a module twice, the gradient must be changed once. (With
/// std::unordered_set, step and update take 5 % more instructions for 100 small gradients.)
using SeenGradients = ska::flat_hash_set<const c10::TensorImpl*>;

/// Throws if `optimizer` would step only the tensor `parameter`, although its weight has further
/// parts.
inline void check_steps(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                        ErrorPlace where) {
  const WeightMeta* const meta = weight_meta_of(parameter);
  if (!meta || dynamic_cast<const ClippingStep*>(&optimizer)) return;
  meta->refuse_plain_step(where);
}

/// Collects the gradients of an optimizer, each once, by device and dtype.
class GradientGatherer {
 public:
  GradientGatherer(const torch::optim::Optimizer& optimizer, HalfGradients half_gradients,
                   std::size_t count)
      : optimizer_(optimizer), half_(half_gradients), count_(count) {
    seen_.reserve(count);
  }

  /// Adds the gradient of `parameter`, which `where` names. Throws if kernels cannot take it.
  void add(const at::Tensor& parameter, ErrorPlace where) {
    check_steps(optimizer_, parameter, where);
    at::Tensor gradient = gradient_of(parameter);
    const bool may_change = gradient.is_sparse() || gradient.is_conj() || gradient.is_neg();
    if (may_change) gradient = seen_whole(gradient, half_);
    const bool is_new = may_change && !gradient.is_same(gradient_of(parameter));
    if (is_new) {
      to_change_.push_back(parameter);
      changed_.push_back(gradient);
    }
    if (!seen_.insert((is_new ? parameter : gradient).unsafeGetTensorImpl()).second) return;
    at::Tensor values =
        is_plain(gradient) ? std::move(gradient) : values_of(gradient, half_, where);
    std::vector<at::Tensor>& batch = group_of(batches_, TensorKind::of(values)).gradients;
    if (batch.empty()) batch.reserve(count_);
    batch.push_back(std::move(values));
  }

  /// Gives parameters their new gradients.
  std::vector<GradientBatch> finish() {
    for (std::size_t i = 0; i < to_change_.size(); ++i) {
      to_change_[i].mutable_grad() = std::move(changed_[i]);
    }
    return std::move(batches_);
  }

 private:
  const torch::optim::Optimizer& optimizer_;
  HalfGradients half_;
  std::size_t count_;  // of gradients at most
  SeenGradients seen_;
  std::vector<at::Tensor> to_change_, changed_;  // parameters and their new gradients
  std::vector<GradientBatch> batches_;
};

/// Every gradient of every group of `optimizer`, once, each in its own memory, by device and dtype.
/// Gradients with the conjugate or the negative bit are replaced by resolved() ones. If this
/// throws, every gradient has its previous value. `call` begins the error texts.
inline std::vector<GradientBatch> gradients_of(torch::optim::Optimizer& optimizer,
                                               HalfGradients half_gradients, const char* call) {
  separate_gradients(optimizer);
  const auto& groups = optimizer.param_groups();
  std::size_t count = 0;
  for (const auto& group : groups) count += group.params().size();
  GradientGatherer gatherer(optimizer, half_gradients, count);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& parameters = groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      if (!parameter.defined() || !gradient_of(parameter).defined()) continue;
      gatherer.add(parameter, [&] {
        return joined(
            {call, ": the gradient of parameter ", i, " in group ", g, ' ', parameter.sizes()});
      });
    }
  }
  return gatherer.finish();
}

}  // namespace TORCHAMP_NAMESPACE::detail
