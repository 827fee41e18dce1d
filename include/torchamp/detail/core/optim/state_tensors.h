// SPDX-License-Identifier: BSD-3-Clause
// A table of LibTorch's own kinds of optimizers. Fused optimizers describe themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>
#include <vector>

#include "torchamp/detail/core/optim/stored_fields.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A kind of LibTorch's optimizers.
template <class OptimizerType, class OptionsType, class StateType, bool elementwise>
struct LibTorchKind {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
  using State = StateType;
  /// Whether it treats each element independently.
  static constexpr bool is_elementwise = elementwise;
};

/// Calls f with each kind until f returns true. Returns whether it did.
template <class F>
bool any_libtorch_kind(const F& f) {
  using namespace torch::optim;
  return f(LibTorchKind<Adam, AdamOptions, AdamParamState, true>()) ||
         f(LibTorchKind<AdamW, AdamWOptions, AdamWParamState, true>()) ||
         f(LibTorchKind<SGD, SGDOptions, SGDParamState, true>()) ||
         f(LibTorchKind<RMSprop, RMSpropOptions, RMSpropParamState, true>()) ||
         f(LibTorchKind<Adagrad, AdagradOptions, AdagradParamState, true>()) ||
         f(LibTorchKind<LBFGS, LBFGSOptions, LBFGSParamState, false>());
}

// The tensors that a kind stores for a parameter, of its shape and written in place.
inline auto tensors_of(torch::optim::AdamParamState& s) {
  return std::tie(s.exp_avg(), s.exp_avg_sq(), s.max_exp_avg_sq());
}
inline auto tensors_of(torch::optim::AdamWParamState& s) {
  return std::tie(s.exp_avg(), s.exp_avg_sq(), s.max_exp_avg_sq());
}
inline auto tensors_of(torch::optim::SGDParamState& s) {
  return std::tie(s.momentum_buffer());
}
inline auto tensors_of(torch::optim::RMSpropParamState& s) {
  return std::tie(s.square_avg(), s.momentum_buffer(), s.grad_avg());
}
inline auto tensors_of(torch::optim::AdagradParamState& s) {
  return std::tie(s.sum());
}
inline auto tensors_of(torch::optim::LBFGSParamState&) {
  return std::tuple<>();
}

/// Calls f with each defined tensor in the state that has the parameter's shape and is written in
/// place; with none of LBFGS's state. If the state neither is LibTorch's nor lists its tensors,
/// returns false and does not call f.
template <class F>
bool for_each_state_tensor(torch::optim::OptimizerParamState& state, const F& f) {
  if (auto* const of_tensors = dynamic_cast<StateOfTensors*>(&state)) {
    of_tensors->for_each_tensor([&f](at::Tensor& tensor) {
      if (tensor.defined()) f(tensor);
    });
    return true;
  }
  return any_libtorch_kind([&]<class Kind>(Kind) {
    auto* const own = dynamic_cast<typename Kind::State*>(&state);
    if (!own) return false;
    std::apply([&f](auto&... tensors) { ((tensors.defined() ? f(tensors) : void()), ...); },
               tensors_of(*own));
    return true;
  });
}

/// Whether LibTorch 2.15 completes such options of a group from the optimizer's defaults. It
/// replaces options of other types by the defaults.
inline bool is_known_to_libtorch(const torch::optim::OptimizerOptions& options) {
  return any_libtorch_kind([&options]<class Kind>(Kind) {
    return dynamic_cast<const typename Kind::Options*>(&options) != nullptr;
  });
}

/// Adds a group with its own options to an optimizer, whatever the type of the options.
inline void add_group(torch::optim::Optimizer& optimizer,
                      const torch::optim::OptimizerParamGroup& group) {
  optimizer.add_param_group(group);
  if (!group.has_options() || is_known_to_libtorch(group.options())) return;
  optimizer.param_groups().back().set_options(group.options().clone());
}

/// The parameters of all groups, one group after the other.
inline std::vector<at::Tensor> all_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

}  // namespace TORCHAMP_NAMESPACE::detail
