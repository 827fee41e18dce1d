// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/step_list.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Steps without a fused kernel]
// If a device has no fused kernel that uses the scale and the flag, a list's parameters, gradients
// and states are copied into one flat tensor each. Ordinary ops then step them all at once, without
// a read by the host. 16-bit numbers are stepped in fp32. If the step is skipped, the old values
// are stored again. For one list this takes some 30 launches instead of one (15 to 20 of them
// process all parameters), and temporary memory for some five copies of the parameters.

/// A list of one step, for ordinary ops.
class FlatStep {
 public:
  at::Tensor params, grads;       ///< with at least the precision of fp32
  std::vector<at::Tensor> state;  ///< by kind
  at::Tensor rate;                ///< of learning, 0-dim

  FlatStep(const StepList& list, const StepScalars& scalars, double learning_rate)
      : grads(flat(list.grads)),
        rate(list.rate.defined() ? list.rate : at::full({}, learning_rate, grads.options())),
        list_(list),
        found_inf_(scalars.found_inf()) {
    std::vector<at::Tensor> tensors = list.params;
    for (const auto& kind : list.state) tensors.insert(tensors.end(), kind.begin(), kind.end());
    state = flat(tensors).chunk(static_cast<int64_t>(1 + list.state.size()));
    params = state.front();
    state.erase(state.begin());
    if (scalars.grad_scale()) grads.div_(*scalars.grad_scale());
  }

  /// How often the parameters have been stepped, this step included unless it is skipped. Only of a
  /// list with a counter: of a kernel that is `apart`, that has no `op`, or whose `op` the device
  /// lacks.
  at::Tensor count() const {
    TORCH_INTERNAL_ASSERT(list_.counter, "the kernel's state has no step");
    return list_.counter->value.to(params.scalar_type());
  }

  /// Adds `weight` times the parameters to the gradients.
  void decay(double weight) const {
    if (weight != 0.) grads.add_(params, weight);
  }

  /// Subtracts `length` times `direction` from the parameters, and stores parameters and states in
  /// the optimizer's tensors, unless the step is skipped.
  void descend(at::Tensor direction, const at::Tensor& length) const {
    params.addcmul_(direction, length, /*value=*/-1.);
    direction.reset();  // frees memory for the following ops
    // A step that runs out of memory changes nothing: this comes before the first write.
    take_back_if_skipped(list_.params, params);
    for (std::size_t k = 0; k < state.size(); ++k) take_back_if_skipped(list_.state[k], state[k]);
    store(list_.params, params);
    for (std::size_t k = 0; k < state.size(); ++k) store(list_.state[k], state[k]);
  }

 private:
  static at::Tensor flat(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> parts;
    parts.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) parts.push_back(in_memory_order(tensor));
    at::Tensor all = at::cat(parts);
    return is_16_bit(all.scalar_type()) ? all.to(at::kFloat) : all;
  }

  /// Puts the values of `tensors` into `all` if the step is skipped.
  void take_back_if_skipped(const std::vector<at::Tensor>& tensors, at::Tensor all) const {
    if (found_inf_) at::where_out(all, found_inf_->to(at::kBool), flat(tensors), all);
  }

  static void store(const std::vector<at::Tensor>& tensors, const at::Tensor& all) {
    std::vector<at::Tensor> parts;
    int64_t offset = all.storage_offset();
    for (const at::Tensor& tensor : tensors) {
      parts.push_back(all.as_strided(tensor.sizes(), tensor.strides(), offset));
      offset += tensor.numel();
    }
    at::_foreach_copy_(tensors, parts);
  }

  const StepList& list_;
  const std::optional<at::Tensor>& found_inf_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
