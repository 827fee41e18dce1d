// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <type_traits>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Calls f for the tensors that LibTorch's own optimizers keep for a parameter, of its shape and
/// written in place, so far as they are defined. For none of LBFGS's and other kinds of state.
template <class F>
void for_each_state_tensor(torch::optim::OptimizerParamState& state, const F& f) {
  using namespace torch::optim;
  const auto each = [&f](auto&... tensors) { ((tensors.defined() ? f(tensors) : void()), ...); };
  if (auto* const adam = dynamic_cast<AdamParamState*>(&state)) {
    each(adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq());
  } else if (auto* const adamw = dynamic_cast<AdamWParamState*>(&state)) {
    each(adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq());
  } else if (auto* const sgd = dynamic_cast<SGDParamState*>(&state)) {
    each(sgd->momentum_buffer());
  } else if (auto* const rmsprop = dynamic_cast<RMSpropParamState*>(&state)) {
    each(rmsprop->square_avg(), rmsprop->momentum_buffer(), rmsprop->grad_avg());
  } else if (auto* const adagrad = dynamic_cast<AdagradParamState*>(&state)) {
    each(adagrad->sum());
  }
}

/// Whether LibTorch 2.15 takes what such options of a group leave out from an optimizer's defaults.
/// It replaces options of other types by the defaults.
inline bool is_known_to_libtorch(const torch::optim::OptimizerOptions& options) {
  using namespace torch::optim;
  const auto is_any = [&options]<class... Types>(std::type_identity<Types>...) {
    return (... || (dynamic_cast<const Types*>(&options) != nullptr));
  };
  return is_any(std::type_identity<AdamOptions>(), std::type_identity<AdamWOptions>(),
                std::type_identity<SGDOptions>(), std::type_identity<RMSpropOptions>(),
                std::type_identity<AdagradOptions>(), std::type_identity<LBFGSOptions>());
}

/// The parameters of all groups, one group after the other.
inline std::vector<at::Tensor> all_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

}  // namespace torchamp::detail
