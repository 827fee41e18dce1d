// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <typeinfo>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Which optimizer it is]
// torch.amp identifies an optimizer by id(), its address. In C++ an optimizer may be moved, so
// torchamp identifies it by the address of its default options, which stays the same. If another
// optimizer is created at that address later, its first parameter distinguishes it. If the first
// parameter is also the same, in one iteration, the new optimizer counts as the old one.

/// An optimizer whose class has another name in error texts.
class NamedOptimizer {
 public:
  /// For the library's own headers: the name in error texts, valid until the program ends.
  virtual const char* name_in_errors() const = 0;

 protected:
  ~NamedOptimizer() = default;
};

/// The class of an optimizer for error texts: "FusedAdam", "torch::optim::Adam". Valid after the
/// optimizer is destroyed.
class OptimizerName {
 public:
  OptimizerName() = default;
  explicit OptimizerName(const torch::optim::Optimizer& optimizer) : type_(&typeid(optimizer)) {
    const auto* const named = dynamic_cast<const NamedOptimizer*>(&optimizer);
    if (named) name_ = named->name_in_errors();
  }

  std::string text() const { return name_ ? name_ : c10::demangle(type_->name()); }

 private:
  const std::type_info* type_ = nullptr;
  const char* name_ = nullptr;
};

/// Identifies an optimizer. Keeps neither the optimizer nor its parameter alive.
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
  /// Undefined if there is no parameter.
  static at::Tensor first_parameter_of(const torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups()) {
      if (!group.params().empty()) return group.params().front();
    }
    return {};
  }

  const void* defaults_ = nullptr;
  WeakTensor first_parameter_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
