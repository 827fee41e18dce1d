// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Which optimizer it is]
// torch.amp knows an optimizer by id(), its address. In C++ an optimizer may be moved, so it is
// known by the address of its default options, which move with it. Another optimizer may be created
// at that address later, so its first parameter counts, too. If that one is also the same, in the
// same iteration, the new optimizer is taken for the old one.

/// Which optimizer it is. Keeps neither it nor its parameter alive.
class OptimizerIdentity {
 public:
  OptimizerIdentity() = default;
  explicit OptimizerIdentity(const torch::optim::Optimizer& optimizer)
      : defaults_(&optimizer.defaults()), first_parameter_(first_parameter_of(optimizer)) {}

  bool is(const torch::optim::Optimizer& optimizer) const {
    return defaults_ == &optimizer.defaults() && first_parameter_.is(first_parameter_of(optimizer));
  }
  bool operator==(const OptimizerIdentity& other) const {
    return defaults_ == other.defaults_ &&
           first_parameter_.address() == other.first_parameter_.address();
  }

 private:
  /// Undefined if there is none.
  static at::Tensor first_parameter_of(const torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups()) {
      if (!group.params().empty()) return group.params().front();
    }
    return {};
  }

  const void* defaults_ = nullptr;
  WeakTensor first_parameter_;
};

}  // namespace torchamp::detail
