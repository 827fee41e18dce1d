// SPDX-License-Identifier: BSD-3-Clause
// Data that torchamp attaches to a weight, and walks over an optimizer's parameters and gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Weights that carry something]
// Master weights attach a WeightMeta to the TensorImpl of a weight, so that all code with the
// weight can find it, and so that it lives as long as the weight. Gradients, optimizers and the
// scaler use masters only through it: it names the processes that agree on an overflow and on a
// norm, and the method by which the weight is stepped.

/// How fused optimizers step a weight if they do not step the tensor itself: a StepMethod.
class AnyStepMethod {
 protected:
  ~AnyStepMethod() = default;
};
class Shards;  // in detail/core/gradients/shards.h

/// Returns the beginning of an error text; called only if there is an error.
using ErrorPlace = c10::function_ref<std::string()>;

/// The data that torchamp attaches to a weight.
struct WeightMeta : c10::BackendMeta {
  bool has_optimizer = false;        ///< an optimizer that may step the weight has it
  std::shared_ptr<Shards> shards{};  ///< if the weight is a shard of a master
  std::size_t index = 0;             ///< of that master
  /// For a model's weight: the object that holds its master. Expired after that object's end.
  std::weak_ptr<const void> masters{};
  /// Whether the master is a separate tensor, so that steps of the weight itself are lost.
  bool has_master_apart = false;
  uint32_t same_writes = 0;  ///< how many writes have not changed the weight's values
  uint64_t moved = 0;        ///< of a separate master: gradients_moved() after it got gradients
  /// How fused optimizers step the weight, if they do not step the tensor itself.
  const AnyStepMethod* step_method = nullptr;

  /// The dtype of gradients and of optimizer state for `weight`.
  virtual at::ScalarType step_dtype(const at::Tensor& weight) const { return weight.scalar_type(); }
  /// For an optimizer that ignores step_method: throws if the weight has a step_method.
  virtual void refuse_plain_step(ErrorPlace /*where*/) const {}
  /// Records that the program has dropped the gradient.
  virtual void note_gradient_dropped() {}
  /// Records that the optimizer's parameter got a gradient; `times`: gradients_moved() after that.
  virtual void note_gradient_taken(uint64_t times) { moved = times; }
};

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// Calls `f` with each defined parameter until `f` returns true. Returns whether it did.
template <class F>
bool any_parameter(const torch::optim::Optimizer& optimizer, const F& f) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.defined() && f(parameter)) return true;
    }
  }
  return false;
}

/// The same with each gradient.
template <class F>
bool any_gradient(const torch::optim::Optimizer& optimizer, const F& f) {
  return any_parameter(optimizer, [&](const at::Tensor& parameter) {
    const at::Tensor& gradient = gradient_of(parameter);
    return gradient.defined() && f(gradient);
  });
}
inline bool any_gradient(const torch::optim::Optimizer& optimizer) {
  return any_gradient(optimizer, [](const at::Tensor&) { return true; });
}

/// The parameters, and their gradients in the same order, of which some may be undefined, as walks
/// for a Snapshot.
inline auto walk_parameters(const torch::optim::Optimizer& optimizer) {
  return [&optimizer](const auto& f) { return any_parameter(optimizer, f); };
}
inline auto walk_gradients(const torch::optim::Optimizer& optimizer) {
  return [&optimizer](const auto& f) {
    return any_parameter(optimizer,
                         [&f](const at::Tensor& parameter) { return f(gradient_of(parameter)); });
  };
}

/// Null for most tensors.
inline WeightMeta* weight_meta_of(const at::TensorBase& tensor) {
  c10::BackendMeta* const meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return meta ? dynamic_cast<WeightMeta*>(meta) : nullptr;
}

/// The dtype of a parameter's gradient and of an optimizer's state for it.
inline at::ScalarType step_dtype(const at::Tensor& parameter) {
  const WeightMeta* const meta = weight_meta_of(parameter);
  return meta ? meta->step_dtype(parameter) : parameter.scalar_type();
}

/// Records that the program has dropped the gradient of `weight`, which may be undefined.
inline void note_gradient_dropped(const at::Tensor& weight) {
  if (!weight.defined()) return;
  if (WeightMeta* const meta = weight_meta_of(weight)) meta->note_gradient_dropped();
}

/// How many parameters of `optimizer` have a gradient. Reads no device.
inline std::size_t count_gradients(const torch::optim::Optimizer& optimizer) {
  std::size_t count = 0;
  any_gradient(optimizer, [&](const at::Tensor&) { return ++count == 0; });
  return count;
}

/// How often gradients were moved to master weights, by any thread: the calls of an iteration may
/// come from several threads, one after the other.
inline std::atomic<uint64_t>& gradients_moved() {
  static std::atomic<uint64_t> times = 0;
  return times;
}
/// Whether masters that `optimizer` steps got gradients after the first `times` moves.
inline bool any_moved_after(const torch::optim::Optimizer& optimizer, uint64_t times) {
  return any_parameter(optimizer, [&](const at::Tensor& parameter) {
    const WeightMeta* const meta = weight_meta_of(parameter);
    return meta && meta->moved > times;
  });
}

}  // namespace TORCHAMP_NAMESPACE::detail
