// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The gradients that the optimizers' parameters have when it is made. Keeps none of them alive.
class GradientsBefore {
 public:
  using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

  explicit GradientsBefore(const Optimizers& optimizers) {
    for_each_parameter(optimizers, [this](const at::Tensor& parameter) {
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      before_.emplace_back(gradient.defined() ? Weak(gradient.getIntrusivePtr()) : none());
    });
  }

  /// Takes the others away: what a capture that failed has put there has no values.
  void drop_others(const Optimizers& optimizers) const {
    std::size_t i = 0;
    for_each_parameter(optimizers, [&](const at::Tensor& parameter) {
      at::Tensor& gradient = parameter.unsafeGetTensorImpl()->mutable_grad();
      const auto before = i < before_.size() ? before_[i].lock() : none().lock();
      if (gradient.unsafeGetTensorImpl() != before.get()) gradient.reset();
      ++i;
    });
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static Weak none() {
    return Weak(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>());
  }

  template <class F>
  static void for_each_parameter(const Optimizers& optimizers, const F& f) {
    for (torch::optim::Optimizer& optimizer : optimizers) {
      for (const auto& group : optimizer.param_groups()) {
        for (const at::Tensor& parameter : group.params()) {
          if (parameter.defined()) f(parameter);
        }
      }
    }
  }

  std::vector<Weak> before_;
};

}  // namespace torchamp::detail
