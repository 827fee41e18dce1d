// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Gradients of one device and dtype, as one batch kernel takes them.
struct GradientBatch : TensorKind {
  std::vector<at::Tensor> gradients{};
};

/// Where fp16 gradients are an error, as dividing them by the scale would lose what it was for.
enum class HalfGradients { refused, allowed };

/// The same values without the conjugate and the negative bit, which kernels that write in place do
/// not look at.
inline at::Tensor resolved(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
}

/// The dense strided tensor that holds all values of `gradient`, for kernels to change in place.
/// Throws for what they cannot take, with `where` to name it.
template <class Where>
at::Tensor values_of(const at::Tensor& gradient, HalfGradients half, const Where& where) {
  const at::ScalarType dtype = gradient.scalar_type();
  TORCH_CHECK_VALUE(
      half == HalfGradients::allowed || dtype != at::kHalf, where(),
      " is fp16. Keep the parameters in fp32 and let AutocastGuard cast them: an fp16 gradient "
      "divided by the scale underflows. (A fused optimizer's step takes fp16 gradients.)");
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble || is_16_bit(dtype) ||
                        dtype == at::kComplexFloat || dtype == at::kComplexDouble,
                    where(), " is ", dtype, ". Gradients are fp32, fp64, bf16, or complex.");
  TORCH_CHECK_VALUE(gradient.layout() == at::kStrided || gradient.is_sparse(), where(),
                    " has the layout ", gradient.layout(), ". Gradients are dense or sparse COO.");
  at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  if (values.is_complex()) values = at::view_as_real(values);
  TORCH_CHECK_VALUE(
      !repeats_elements(values), where(),
      " is an expanded tensor, whose elements share memory. Give .grad a clone() of it.");
  return values;
}

inline bool has_half_gradients(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined()) continue;
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      if (gradient.defined() && gradient.scalar_type() == at::kHalf) return true;
    }
  }
  return false;
}

/// The gradients that a collection holds already: one that several places of an optimizer lead to,
/// as the weight of a module that a model has registered twice, is to be changed once.
/// (A table that grows allocates more often than all else in a step of small gradients.)
class SeenGradients {
 public:
  /// Of at most `count` gradients.
  explicit SeenGradients(std::size_t count) : slots_(std::bit_ceil(2 * count + 1)) {}

  /// Whether it is new.
  bool insert(const c10::TensorImpl* gradient) {
    const std::size_t last = slots_.size() - 1;
    const auto address = reinterpret_cast<std::uintptr_t>(gradient);
    std::size_t at = (address * 0x9E3779B97F4A7C15u >> 32) & last;
    for (; slots_[at] != nullptr; at = (at + 1) & last) {
      if (slots_[at] == gradient) return false;
    }
    slots_[at] = gradient;
    return true;
  }

 private:
  std::vector<const c10::TensorImpl*> slots_;  // a power of two, less than half of them taken
};

inline std::size_t count_parameters(const torch::optim::Optimizer& optimizer) {
  std::size_t count = 0;
  for (const auto& group : optimizer.param_groups()) count += group.params().size();
  return count;
}

/// Every gradient of every group of `optimizer`, once, by device and dtype. Parameters whose
/// gradients have the conjugate or the negative bit are given resolved() ones. Nothing has been
/// changed where this throws. `call` begins the error texts. Sets `is_shared` where several
/// parameters, or places of one, have the same gradient.
inline std::vector<GradientBatch> gradients_of(torch::optim::Optimizer& optimizer,
                                               HalfGradients half, const char* call,
                                               bool* is_shared = nullptr) {
  std::vector<GradientBatch> batches;
  std::vector<at::Tensor> to_change, changed;  // parameters and their new gradients
  const std::size_t count = count_parameters(optimizer);
  SeenGradients seen(count);
  auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& parameters = groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      if (!parameter.defined()) continue;
      at::Tensor gradient = parameter.unsafeGetTensorImpl()->grad();  // grad() warns of non-leaves
      if (!gradient.defined()) continue;
      const auto where = [&] {
        return c10::str(call, ": the gradient of parameter ", i, " in group ", g, ' ',
                        parameter.sizes());
      };
      check_steps(optimizer, parameter, where);
      bool is_new = false;
      if (gradient.is_sparse() && gradient.scalar_type() == at::kHalf &&
          half == HalfGradients::allowed && !gradient.is_coalesced()) {
        // Adding up what shares an index may overflow, which must be seen.
        gradient = gradient.coalesce();
        is_new = true;
      } else if (gradient.is_conj() || gradient.is_neg()) {
        gradient = resolved(gradient);
        is_new = true;
      }
      if (is_new) {
        to_change.push_back(parameter);
        changed.push_back(gradient);
      }
      if (!seen.insert((is_new ? parameter : gradient).unsafeGetTensorImpl())) {
        if (is_shared != nullptr) *is_shared = true;
        continue;
      }
      at::Tensor values = values_of(gradient, half, where);
      std::vector<at::Tensor>& batch = group_of(batches, TensorKind::of(values)).gradients;
      if (batch.empty()) batch.reserve(count);
      batch.push_back(std::move(values));
    }
  }
  for (std::size_t i = 0; i < to_change.size(); ++i) {
    to_change[i].mutable_grad() = std::move(changed[i]);
  }
  return batches;
}

}  // namespace torchamp::detail
