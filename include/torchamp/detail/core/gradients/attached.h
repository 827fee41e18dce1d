// SPDX-License-Identifier: BSD-3-Clause
// What a weight carries for this library, and walks over an optimizer's parameters and gradients.
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

namespace torchamp::detail {

// Note [Weights that carry something]
// Master weights hang a WeightMeta at the TensorImpl of a weight, so that whoever is given the
// weight finds it, and so that it lives as long as the weight. Gradients, optimizers and the scaler
// know no more of masters than what stands here: who must agree on an overflow and on a norm, and
// how the weight is stepped.

/// How fused optimizers step a weight that they do not step as it is: their StepMethod.
class AnyStepMethod {
 protected:
  ~AnyStepMethod() = default;
};
class Shards;  // in detail/core/gradients/shards.h

/// What begins an error text; called where there is an error.
using ErrorPlace = c10::function_ref<std::string()>;

/// What a weight carries for this library.
struct WeightMeta : c10::BackendMeta {
  bool has_optimizer = false;        ///< an optimizer that may step it was given the weight
  std::shared_ptr<Shards> shards{};  ///< where the weight is a shard of a master
  std::size_t index = 0;             ///< of that master
  /// Of a model's weight: those that keep its master. Expired once they are gone.
  std::weak_ptr<const void> masters{};
  /// And whether that is a tensor apart, so that steps of this one are lost.
  bool has_master_apart = false;
  uint32_t same_writes = 0;  ///< how many writes have left the weight as it was
  uint64_t moved = 0;        ///< of a master apart: gradients_moved() after it was given gradients
  /// How fused optimizers step the weight, where they do not step the tensor itself.
  const AnyStepMethod* step_method = nullptr;

  /// The dtype of gradients and of optimizer state for `weight`.
  virtual at::ScalarType step_dtype(const at::Tensor& weight) const { return weight.scalar_type(); }
  /// Throws where the weight has a step_method, for an optimizer that does not go by it.
  virtual void refuse_plain_step(ErrorPlace /*where*/) const {}
  /// The program has dropped the gradient.
  virtual void note_gradient_dropped() {}
  /// The optimizer's parameter was given a gradient; `times`: gradients_moved() after that.
  virtual void note_gradient_taken(uint64_t times) { moved = times; }
};

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// Calls `f` with each parameter that is defined until it returns true; whether it did.
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

/// The program has dropped the gradient of `weight`, which may be undefined.
inline void note_gradient_dropped(const at::Tensor& weight) {
  if (!weight.defined()) return;
  if (WeightMeta* const meta = weight_meta_of(weight)) meta->note_gradient_dropped();
}

/// How many parameters of `optimizer` have one. Reads no device.
inline std::size_t count_gradients(const torch::optim::Optimizer& optimizer) {
  std::size_t count = 0;
  any_gradient(optimizer, [&](const at::Tensor&) { return ++count == 0; });
  return count;
}

/// How often gradients were moved to master weights, by any thread: an iteration's calls may come
/// from several, one after the other.
inline std::atomic<uint64_t>& gradients_moved() {
  static std::atomic<uint64_t> times = 0;
  return times;
}
/// Whether masters that `optimizer` steps were given gradients after the first `times` of these.
inline bool any_moved_after(const torch::optim::Optimizer& optimizer, uint64_t times) {
  return any_parameter(optimizer, [&](const at::Tensor& parameter) {
    const WeightMeta* const meta = weight_meta_of(parameter);
    return meta && meta->moved > times;
  });
}

}  // namespace torchamp::detail
