// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "torchamp/detail/gradients/accumulation.h"
#include "torchamp/detail/master_meta.h"

namespace torchamp::detail {

/// Whether a DistributedDataParallel has left the gradients of its parameters as they are.
class UnsyncedGradients {
 public:
  /// Accumulations find it, while it lives.
  static std::shared_ptr<UnsyncedGradients> of(const std::vector<at::Tensor>& parameters) {
    auto made = std::make_shared<UnsyncedGradients>(parameters);
    const std::lock_guard lock(mutex());
    std::erase_if(all(), [](const auto& one) { return one.expired(); });
    all().push_back(made);
    has_local_gradients() = any_of_all;
    return made;
  }
  explicit UnsyncedGradients(const std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) {
      parameters_.emplace_back(parameter.getIntrusivePtr());
    }
  }

  /// Of the optimizer's parameters, or of the weights whose masters they are.
  bool any_of(const torch::optim::Optimizer& optimizer) const {
    if (!are_unsynced) return false;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (!parameter.defined()) continue;
        const c10::TensorImpl* const tensor = parameter.unsafeGetTensorImpl();
        const auto* const master = dynamic_cast<const MasterMeta*>(
            const_cast<c10::TensorImpl*>(tensor)->get_backend_meta());
        if (has(tensor) || (master && has(master->narrow._unsafe_get_target()))) return true;
      }
    }
    return false;
  }

  std::atomic<bool> are_unsynced = false;

 private:
  static bool any_of_all(const torch::optim::Optimizer& optimizer) {
    const std::lock_guard lock(mutex());
    for (const auto& weak : all()) {
      const auto one = weak.lock();
      if (one && one->any_of(optimizer)) return true;
    }
    return false;
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<std::weak_ptr<UnsyncedGradients>>& all() {
    static std::vector<std::weak_ptr<UnsyncedGradients>> all;
    return all;
  }

  bool has(const c10::TensorImpl* tensor) const {
    for (const auto& parameter : parameters_) {
      if (parameter._unsafe_get_target() == tensor) return true;
    }
    return false;
  }

  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> parameters_;
};

}  // namespace torchamp::detail
