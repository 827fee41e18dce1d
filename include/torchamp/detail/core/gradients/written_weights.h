// SPDX-License-Identifier: BSD-3-Clause
// Who is told that weights were written to: caches of their casts, and masters.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <torch/optim/optimizer.h>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Whom to tell that weights were written to; null if nobody keeps anything of them. The function
/// may lie in another shared library, of another version: so its address is the default value of
/// the first argument of an op, which is found by its name. derived_weights() in
/// extras/weights/derived.h defines that op, which stays until the process ends: see
/// Note [Weights that are written].
inline WeightsWritten find_weights_written() {
  static const c10::OperatorName name(weights_written_op, "");
  const auto found = c10::Dispatcher::singleton().findSchema(name);
  if (!found) return nullptr;
  const auto& address = found->schema().arguments()[0].default_value();
  return reinterpret_cast<WeightsWritten>(address->toInt());
}

/// Says by an empty list that a step has ended: see WeightsWritten in base/tensors.h.
inline void tell_that_step_has_ended(WeightsWritten tell) {
  tell(at::TensorList());
}

/// Has masters notice a step that LibTorch's own optimizers may hide: SGD writes through data().
inline void note_written(const torch::optim::Optimizer& optimizer) {
  any_parameter(optimizer, [](const at::Tensor& parameter) {
    const bool was_stepped = gradient_of(parameter).defined();
    if (was_stepped && weight_meta_of(parameter)) parameter.unsafeGetTensorImpl()->bump_version();
    return false;
  });
}

/// Made where weights are written to. Its end, also after an exception, drops LibTorch's cached
/// casts of them, which would return the old values within a region, and the casts cached until a
/// step.
class DropWeightCasts {
 public:
  /// Where LibTorch counts the writes.
  DropWeightCasts() = default;
  /// Where it may not: the optimizer's parameters are told to have changed, too.
  explicit DropWeightCasts(const torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  ~DropWeightCasts() {
    at::autocast::clear_cache();
    const WeightsWritten tell = find_weights_written();
    if (tell == nullptr) return;
    tell_that_step_has_ended(tell);
    if (optimizer_ == nullptr) return;
    for (const auto& group : optimizer_->param_groups()) tell(group.params());
  }
  DropWeightCasts(const DropWeightCasts&) = delete;
  DropWeightCasts& operator=(const DropWeightCasts&) = delete;

 private:
  const torch::optim::Optimizer* optimizer_ = nullptr;
};

}  // namespace torchamp::detail
