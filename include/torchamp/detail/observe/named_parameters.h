// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// By their names in `module`, which is a torch::nn::Module or has named_parameters() as one has.
template <class Module>
NamedParameters parameters_by_name(const Module& module) {
  NamedParameters named;
  for (const auto& item : module.named_parameters()) named.emplace_back(item.key(), item.value());
  return named;
}

/// By their places in `optimizer`: "group 0, parameter 3".
inline NamedParameters parameters_by_place(const torch::optim::Optimizer& optimizer) {
  NamedParameters named;
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& parameters = groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      named.emplace_back("group " + std::to_string(g) + ", parameter " + std::to_string(i),
                         parameters[i]);
    }
  }
  return named;
}

/// The parameters of a module or an optimizer, given itself, by a pointer of any kind or by a
/// module holder; or a range of pairs of a name and a parameter.
template <class Owner>
NamedParameters named_parameters_of(const Owner& owner, const char* call) {
  if constexpr (std::derived_from<Owner, torch::nn::Module>) {
    return parameters_by_name<torch::nn::Module>(owner);
  } else if constexpr (std::derived_from<Owner, torch::optim::Optimizer>) {
    return parameters_by_place(owner);
  } else if constexpr (requires { *owner, static_cast<bool>(owner); }) {
    TORCH_CHECK_VALUE(static_cast<bool>(owner), call,
                      ": was given a null pointer or an empty module holder.");
    return named_parameters_of(*owner, call);
  } else {
    NamedParameters named;
    for (const auto& [name, parameter] : owner) named.emplace_back(name, parameter);
    return named;
  }
}

}  // namespace torchamp::detail
