// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. Which parameters of an optimizer have no gradient, and why.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <optional>
#include <ostream>
#include <vector>

#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// A parameter of an optimizer that has no gradient, and why.
struct MissingGradient {
  /// Why there is no gradient.
  enum class Reason {
    undefined_parameter,  ///< the parameter itself is an undefined tensor
    not_required,         ///< requires_grad is false
    not_a_leaf,           ///< autograd keeps gradients of leaves only
    other_device,         ///< its device type differs from the scaled loss's
    not_reached           ///< no backward() has reached it since its gradient was last cleared
  };
  std::size_t group;     ///< index in Optimizer::param_groups()
  std::size_t index;     ///< index in that group
  Reason reason;         ///< the first reason that applies
  at::Tensor parameter;  ///< the parameter
};

/// Returns the parameters of `optimizer` without a gradient, in order. `loss_device` is the loss's
/// device; if it is unset, no reason is other_device. If a parameter is on another device, the
/// program has probably moved the model after creating the optimizer. Never synchronises.
inline std::vector<MissingGradient> missing_gradients(const torch::optim::Optimizer& optimizer,
                                                      std::optional<at::Device> loss_device = {}) {
  using Reason = MissingGradient::Reason;
  std::vector<MissingGradient> missing;
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& parameters = groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      if (!parameter.defined()) {
        missing.push_back({g, i, Reason::undefined_parameter, parameter});
        continue;
      }
      if (parameter.unsafeGetTensorImpl()->grad().defined()) continue;  // a non-leaf's grad() warns
      Reason reason = Reason::not_reached;
      if (!parameter.requires_grad()) {
        reason = Reason::not_required;
      } else if (!parameter.is_leaf()) {
        reason = Reason::not_a_leaf;
      } else if (loss_device && parameter.device().type() != loss_device->type()) {
        reason = Reason::other_device;
      }
      missing.push_back({g, i, reason, parameter});
    }
  }
  return missing;
}

/// `group 0, parameter 3 (float [64, 32] on cpu): requires_grad is false`
inline std::ostream& operator<<(std::ostream& out, const MissingGradient& missing) {
  constexpr const char* reasons[] = {
      "the parameter is undefined", "requires_grad is false",
      "not a leaf of the graph, so autograd keeps no gradient for it",
      "on another device than the loss (was the model moved after the optimizer was made?)",
      "no backward() has reached it since it was cleared (is the loss detached from it?)"};
  out << "group " << missing.group << ", parameter " << missing.index;
  const at::Tensor& parameter = missing.parameter;
  if (parameter.defined()) {
    out << " (" << parameter.scalar_type() << ' ' << parameter.sizes() << " on "
        << parameter.device() << ')';
  }
  out << ": " << reasons[static_cast<std::size_t>(missing.reason)];
  if (missing.reason == MissingGradient::Reason::not_reached &&
      detail::weight_meta_of(parameter) != nullptr) {
    out << ". With MasterWeights, call take_gradients() before the step, and give the optimizer "
           "masters.parameters()";
  }
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
