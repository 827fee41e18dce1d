// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/optim/check_parameters.h"
#include "torchamp/detail/core/optim/kernel.h"
#include "torchamp/detail/core/optim/step_list.h"

namespace TORCHAMP_NAMESPACE::detail {

// The facts on which a plan depends: see Note [The plan of a fused step].

/// A record of a state at some time.
template <OptimizerKernel Kernel>
struct SeenState {
  using State = typename Kernel::State;

  /// Null if there is none. Only for comparison. A new state may get the address of a destroyed
  /// state, but it has no tensors.
  State* state = nullptr;
  bool has_tensor = false;
  int64_t steps = 0;  ///< as stored in the state
  bool operator==(const SeenState&) const = default;

  static SeenState of(void* param, const ParamStates& states) {
    const auto found = states.find(param);
    if (found == states.end()) return {};
    auto& state = static_cast<State&>(*found->second);
    return {&state, Kernel::tensor(state, 0).defined(), Kernel::steps(state)};
  }
};

/// A parameter in a plan.
template <OptimizerKernel Kernel>
struct PlanSlot {
  c10::TensorImpl* param = nullptr;
  StepList* list = nullptr;  ///< null for a parameter without a gradient
  std::size_t place = 0;     ///< in the list
  SeenState<Kernel> seen{};

  /// Whether the parameter's tensors in its list are the tensors of its state.
  bool has_tensors() const {
    for (std::size_t k = 0; k < list->state.size(); ++k) {
      const at::Tensor& tensor = Kernel::tensor(*seen.state, k);
      if (!list->state[k][place].is_same(tensor)) return false;
    }
    return true;
  }

  /// Adds the gradient to the list. False if the list is not valid for it.
  bool add_gradient(const at::Tensor& tensor, const at::Tensor& gradient) const {
    if (!(TensorKind::of(tensor) == *list) || !tensor.is_non_overlapping_and_dense() ||
        gradient.layout() != at::kStrided) {
      return false;
    }
    if (step_method_of(tensor) != list->method) return false;
    if (list->method && !list->method->holds(tensor, gradient)) return false;
    if (!list->state.empty()) {
      if (!seen.state || !has_tensors()) return false;
      if (!same_layout(tensor, list->state[0][place])) return false;
    }
    list->grads.push_back(fitted(gradient, tensor));
    return true;
  }
};

/// The facts about a group's options on which a plan depends.
struct GroupUse {
  std::size_t kinds;  ///< of state
  bool counted;
  bool uses_counter;  ///< whether its steps use a counter
  bool operator==(const GroupUse&) const = default;
};

template <OptimizerKernel Kernel>
GroupUse use_of(const ParamGroups& groups, std::size_t group) {
  const typename Kernel::Options& options = options_of<Kernel>(groups[group], group);
  const bool counted = Kernel::counted(options);
  return {Kernel::kinds(options), counted, counted && Kernel::uses_counter(options)};
}

}  // namespace TORCHAMP_NAMESPACE::detail
