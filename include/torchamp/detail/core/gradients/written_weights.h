// SPDX-License-Identifier: BSD-3-Clause
// Reports writes to weights, to caches of their casts and to masters.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <torch/optim/optimizer.h>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The function that takes reports of written weights; null if nothing stores casts of weights. The
/// function may be in another shared library, of another version. So its address is the default
/// value of the first argument of an op, which is found by its name. derived_weights() in
/// extras/weights/derived.h defines that op, which exists until the process ends: see
/// Note [Weights that are written].
inline WeightsWritten find_weights_written() {
  static const c10::OperatorName name(weights_written_op, "");
  const auto found = c10::Dispatcher::singleton().findSchema(name);
  if (!found) return nullptr;
  const auto& address = found->schema().arguments()[0].default_value();
  return reinterpret_cast<WeightsWritten>(address->toInt());
}

/// Reports the end of a step by an empty list: see WeightsWritten in base/tensors.h.
inline void report_end_of_step(WeightsWritten tell) {
  tell(at::TensorList());
}

/// Makes a step of LibTorch's own optimizers visible to masters: SGD writes through data(), without
/// a new version.
inline void note_written(const torch::optim::Optimizer& optimizer) {
  any_parameter(optimizer, [](const at::Tensor& parameter) {
    const bool was_stepped = gradient_of(parameter).defined();
    if (was_stepped && weight_meta_of(parameter)) parameter.unsafeGetTensorImpl()->bump_version();
    return false;
  });
}

/// Create it before weights are written. Its destructor, even after an exception, drops LibTorch's
/// cached casts, which would have the old values in a region, and the casts that are cached
/// until a step.
class DropWeightCasts {
 public:
  /// If LibTorch counts the writes.
  DropWeightCasts() = default;
  /// If LibTorch may not count the writes: this also reports the optimizer's parameters as changed.
  explicit DropWeightCasts(const torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  ~DropWeightCasts() {
    at::autocast::clear_cache();
    const WeightsWritten tell = find_weights_written();
    if (tell == nullptr) return;
    report_end_of_step(tell);
    if (optimizer_ == nullptr) return;
    for (const auto& group : optimizer_->param_groups()) tell(group.params());
  }
  DropWeightCasts(const DropWeightCasts&) = delete;
  DropWeightCasts& operator=(const DropWeightCasts&) = delete;

 private:
  const torch::optim::Optimizer* optimizer_ = nullptr;
};

}  // namespace TORCHAMP_NAMESPACE::detail
