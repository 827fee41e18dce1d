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

namespace torchamp::detail {

/// Gradients of one device and dtype, as one batch kernel takes them.
struct GradientBatch : TensorKind {
  std::vector<at::Tensor> gradients{};
};

/// Flags of several devices that become one.
class DeviceFlags {
 public:
  explicit DeviceFlags(const at::Tensor& home) { flags_.push_back(home); }

  at::Tensor& on(at::Device device) {
    for (at::Tensor& flag : flags_) {
      if (flag.device() == device) return flag;
    }
    return flags_.emplace_back(at::zeros({}, flags_[0].options().device(device)));
  }

  /// Sets the first to 1 if any is. Reads no device, but waits for the others' flags where the
  /// first lies on the host.
  void gather() {
    for (std::size_t i = 1; i < flags_.size(); ++i) {
      flags_[0].add_(to_device_async(flags_[0].device(), flags_[i])).clamp_max_(1.);
    }
  }

 private:
  std::vector<at::Tensor> flags_;
};

/// Where fp16 gradients are an error, as dividing them by the scale would lose what it was for.
enum class HalfGradients { refused, allowed };

/// The same values without the conjugate and the negative bit, which kernels that write in place do
/// not look at.
inline at::Tensor resolved(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
}

/// The gradient as kernels see all of it: the same tensor, or one to take its place.
inline at::Tensor seen_whole(const at::Tensor& gradient, HalfGradients half_gradients) {
  if (gradient.is_sparse() && gradient.scalar_type() == at::kHalf &&
      half_gradients == HalfGradients::allowed && !gradient.is_coalesced()) {
    return gradient.coalesce();  // adding up what shares an index may overflow
  }
  return resolved(gradient);
}

/// Whether kernels take `gradient` as it is.
inline bool is_plain(const at::Tensor& gradient) {
  const at::ScalarType dtype = gradient.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && gradient.layout() == at::kStrided &&
         gradient.is_non_overlapping_and_dense();
}

/// The dense strided tensor that holds all values of `gradient`, for kernels to change in place.
/// Throws for what they cannot take, with `where` to name it.
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

/// The gradients that a collection holds already: the gradient of a parameter that an optimizer has
/// twice, such as the weight of a module that a model has registered twice, is changed once. (With
/// std::unordered_set, step and update take 5 % more instructions for 100 small gradients.)
using SeenGradients = ska::flat_hash_set<const c10::TensorImpl*>;

/// Throws where `optimizer` would step the tensor `parameter`, which is not all there is to step.
inline void check_steps(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                        ErrorPlace where) {
  const WeightMeta* const meta = weight_meta_of(parameter);
  if (!meta || dynamic_cast<const ClippingStep*>(&optimizer)) return;
  meta->refuse_plain_step(where);
}

/// Gathers the gradients of an optimizer, each once, by device and dtype.
class GradientGatherer {
 public:
  GradientGatherer(const torch::optim::Optimizer& optimizer, HalfGradients half_gradients,
                   std::size_t count)
      : optimizer_(optimizer), half_(half_gradients), count_(count) {
    seen_.reserve(count);
  }

  /// The gradient of `parameter`, which `where` names. Throws for one that kernels cannot take.
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
/// Parameters whose gradients have the conjugate or the negative bit are given resolved() ones. If
/// this throws, every gradient has its previous value. `call` begins the error texts.
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

}  // namespace torchamp::detail
