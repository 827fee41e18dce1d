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
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/step_method.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
using ParamStates = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Puts others in the place of an optimizer's states. It stays the same optimizer; see Note [Which
/// optimizer it is].
inline void replace_states(torch::optim::Optimizer& optimizer, ParamStates states) {
  const float load_factor = optimizer.state().max_load_factor();
  optimizer.state() = std::move(states);
  optimizer.state().max_load_factor(load_factor);
}

inline ParamGroups one_group(std::vector<at::Tensor> params) {
  return {torch::optim::OptimizerParamGroup(std::move(params))};
}

inline std::string place_of(std::size_t group, std::size_t index) {
  return c10::str("parameter ", index, " of group ", group);
}

inline const at::Tensor& gradient_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->grad();  // Tensor::grad() looks whether to warn of non-leaves
}

/// The options of a group, which must be those that `Kernel` goes by. `number` is for the error.
template <OptimizerKernel Kernel>
const typename Kernel::Options& options_of(const torch::optim::OptimizerParamGroup& group,
                                           std::size_t number) {
  const auto* const options = dynamic_cast<const typename Kernel::Options*>(&group.options());
  TORCH_CHECK_TYPE(options, Kernel::name, ": the options of group ", number,
                   " are another optimizer's. Give it those that ", Kernel::name, " takes.");
  return *options;
}

template <OptimizerKernel Kernel>
const typename Kernel::Options& options_of(const ParamGroups& groups, std::size_t group) {
  return options_of<Kernel>(groups[group], group);
}

/// Throws for a parameter with a gradient that the kernels cannot step. Changes nothing.
template <OptimizerKernel Kernel>
void check_parameters(const ParamGroups& groups, const ParamStates& states) {
  std::unordered_set<c10::TensorImpl*> seen;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::size_t kinds = Kernel::kinds(options_of<Kernel>(groups, g));
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& param = groups[g].params()[i];
      const at::Tensor& grad = gradient_of(param);
      if (!grad.defined()) continue;
      TORCH_CHECK_VALUE(seen.insert(param.unsafeGetTensorImpl()).second, Kernel::name,
                        "::step: ", place_of(g, i),
                        " is in the optimizer twice. Give each parameter once.");
      TORCH_CHECK_VALUE(param.layout() == at::kStrided && grad.layout() == at::kStrided,
                        Kernel::name, "::step: ", place_of(g, i), " has a gradient of layout ",
                        grad.layout(),
                        ". Fused kernels take dense ones: make it dense (for an embedding, "
                        "sparse(false)), or give this parameter to LibTorch's own optimizer.");
      TORCH_CHECK_VALUE(at::isFloatingType(param.scalar_type()), Kernel::name,
                        "::step: ", place_of(g, i), " is of dtype ", param.scalar_type(),
                        ". Fused kernels take real floating-point numbers: give this parameter to "
                        "LibTorch's own optimizer.");
      TORCH_CHECK_VALUE(!param.is_neg(), Kernel::name, "::step: ", place_of(g, i),
                        " has the negative bit. Make the parameter from what resolve_neg() gives.");
      TORCH_CHECK_VALUE(param.is_non_overlapping_and_dense(), Kernel::name,
                        "::step: ", place_of(g, i), " has gaps or overlaps in memory (sizes ",
                        param.sizes(), ", strides ", param.strides(),
                        "). Make the parameter from a contiguous() tensor.");
      if (const StepMethod* const method = step_method_of(param)) {
        method->check(param, grad,
                      [&] { return c10::str(Kernel::name, "::step: ", place_of(g, i)); });
      }
      const auto state = states.find(param.unsafeGetTensorImpl());
      if (state == states.end()) continue;
      for (std::size_t k = 0; k < kinds; ++k) {
        const at::Tensor& tensor =
            Kernel::tensor(static_cast<typename Kernel::State&>(*state->second), k);
        TORCH_CHECK_VALUE(!tensor.defined() || tensor.sizes() == param.sizes(), Kernel::name,
                          "::step: ", place_of(g, i), " is of shape ", param.sizes(),
                          ", its state of ", tensor.sizes(),
                          ". Make a new optimizer for parameters of another shape.");
      }
    }
  }
}

/// Whether two tensors hold their elements in the same order: the fused kernels walk through memory
/// and do not look (on the CPU not even for an error).
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
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

/// Brings the states to where their parameters are, if they are not there: what was loaded may lie
/// on the host.
template <OptimizerKernel Kernel>
void fit_states(const ParamGroups& groups, const ParamStates& states) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::size_t kinds = Kernel::kinds(options_of<Kernel>(groups, g));
    for (const at::Tensor& param : groups[g].params()) {
      const auto state = states.find(param.unsafeGetTensorImpl());
      if (state == states.end()) continue;
      for (std::size_t k = 0; k < kinds; ++k) {
        at::Tensor& tensor =
            Kernel::tensor(static_cast<typename Kernel::State&>(*state->second), k);
        if (tensor.defined() && tensor.sizes() == param.sizes()) tensor = fitted(tensor, param);
      }
    }
  }
}

}  // namespace torchamp::detail
