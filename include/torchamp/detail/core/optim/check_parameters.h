// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/optim/kernel.h"
#include "torchamp/detail/core/optim/step_list.h"

namespace TORCHAMP_NAMESPACE::detail {

using ParamStates = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

inline std::string place_of(std::size_t group, std::size_t index) {
  return "parameter " + std::to_string(index) + " of group " + std::to_string(group);
}

[[noreturn]] inline void refuse_options(const char* name, std::size_t group) {
  TORCH_CHECK_TYPE(false, std::string(name) + ": the options of group " + std::to_string(group) +
                              " belong to another optimizer. Give it the options that " + name +
                              " takes.");
}

/// The options of a group, which must have the type that `Kernel` uses. `number` is for the error.
template <OptimizerKernel Kernel>
const typename Kernel::Options& options_of(const torch::optim::OptimizerParamGroup& group,
                                           std::size_t number) {
  const auto* const options = dynamic_cast<const typename Kernel::Options*>(&group.options());
  if (!options) refuse_options(Kernel::name, number);
  return *options;
}

/// Calls `f(group, index, parameter, tensor)` for each state tensor of each parameter with a state.
template <OptimizerKernel Kernel, class F>
void for_each_state(const ParamGroups& groups, const ParamStates& states, const F& f) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::size_t kinds = Kernel::kinds(options_of<Kernel>(groups[g], g));
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& param = groups[g].params()[i];
      const auto state = states.find(param.unsafeGetTensorImpl());
      if (state == states.end()) continue;
      for (std::size_t k = 0; k < kinds; ++k) {
        f(g, i, param, Kernel::tensor(static_cast<typename Kernel::State&>(*state->second), k));
      }
    }
  }
}

/// Why the kernels cannot step a parameter with a gradient; empty if they can.
inline std::string why_not_fused(const at::Tensor& param, const at::Tensor& grad) {
  if (param.layout() != at::kStrided || grad.layout() != at::kStrided) {
    return " has a gradient of layout " + c10::str(grad.layout()) +
           ". Fused kernels take dense ones: make it dense (for an embedding, "
           "sparse(false)), or give this parameter to LibTorch's own optimizer.";
  }
  if (!at::isFloatingType(param.scalar_type())) {
    return std::string(" is of dtype ") + c10::toString(param.scalar_type()) +
           ". Fused kernels take real floating-point numbers: give this parameter to "
           "LibTorch's own optimizer.";
  }
  if (param.is_neg()) {
    return " has the negative bit. Make the parameter from the result of resolve_neg().";
  }
  if (!param.is_non_overlapping_and_dense()) {
    return " has gaps or overlaps in memory (sizes " + c10::str(param.sizes()) + ", strides " +
           c10::str(param.strides()) + "). Make the parameter from a contiguous() tensor.";
  }
  return "";
}

/// Throws for a parameter with a gradient that the kernels cannot step. Changes nothing.
template <OptimizerKernel Kernel>
void check_parameters(const ParamGroups& groups, const ParamStates& states) {
  ParamStates seen;  // used as a set, because this type is already compiled
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& param = groups[g].params()[i];
      const at::Tensor& grad = gradient_of(param);
      if (!grad.defined()) continue;
      void* const key = param.unsafeGetTensorImpl();
      const bool is_new = seen.find(key) == seen.end();
      seen[key] = nullptr;
      const auto where = [&] { return std::string(Kernel::name) + "::step: " + place_of(g, i); };
      std::string why = is_new ? why_not_fused(param, grad)
                               : " is in the optimizer twice. Give each parameter once.";
      if (why.empty()) why = Kernel::why_not(param);
      TORCHAMP_CHECK_VALUE(why.empty(), where(), why);
      if (const StepMethod* const method = step_method_of(param)) method->check(param, grad, where);
    }
  }
  const auto check = [](auto g, auto i, const at::Tensor& param, const at::Tensor& tensor) {
    const bool is_stepped = gradient_of(param).defined() && tensor.defined();
    TORCHAMP_CHECK_VALUE(!is_stepped || tensor.sizes() == param.sizes(), Kernel::name,
                         "::step: ", place_of(g, i), " is of shape ", param.sizes(),
                         ", its state of ", tensor.sizes(),
                         ". Make a new optimizer for parameters of another shape.");
  };
  for_each_state<Kernel>(groups, states, check);
}

/// `tensor`, or a copy of it with the device and layout of `param`, and the dtype of its steps.
inline at::Tensor fitted(const at::Tensor& tensor, const at::Tensor& param) {
  const TensorKind kind{param.device(), step_dtype(param)};
  if (TensorKind::of(tensor) == kind && same_layout(tensor, param) && !tensor.is_neg()) {
    return tensor;
  }
  at::Tensor copy = at::empty_like(param, param.options().dtype(kind.dtype));
  copy.copy_(tensor);
  return copy;
}

}  // namespace TORCHAMP_NAMESPACE::detail
