// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Weights that carry something]
// Master weights hang a WeightMeta at the TensorImpl of a weight, so that whoever is given the
// weight finds it, and so that it lives as long as the weight. Gradients, optimizers and the scaler
// know no more of masters than what stands here: who must agree on an overflow and on a norm, and
// how the weight is stepped.

class StepMethod;

/// The processes that have a piece each of some masters.
class Shards {
 public:
  Shards() = default;
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;
  virtual ~Shards() = default;

  /// Makes a number the largest that any process has: found_inf, or the largest gradient.
  virtual void agree_largest(at::Tensor& number) const = 0;

  /// The norm of all gradients, from that of each process's own.
  virtual at::Tensor norm_of_all(const at::Tensor& own, double norm_type) const = 0;

  /// Throws for an optimizer that does not treat every element of a weight by itself.
  virtual void check(const torch::optim::Optimizer& optimizer, const char* call) const = 0;
};

/// What begins an error text; called where there is an error.
using ErrorPlace = c10::function_ref<std::string()>;

/// What a weight carries for this library.
struct WeightMeta : c10::BackendMeta {
  bool has_optimizer = false;        ///< an optimizer that may step it was given the weight
  std::shared_ptr<Shards> shards{};  ///< where the weight is a piece of a master
  std::size_t index = 0;             ///< of that master
  /// Of a model's weight: those that keep its master. Expired once they are gone.
  std::weak_ptr<const void> masters{};
  /// And whether that is a tensor apart, so that steps of this one are lost.
  bool has_master_apart = false;
  uint32_t same_writes = 0;  ///< how many writes have left the weight as it was
  uint64_t taken = 0;        ///< of a master apart: gradients_taken() after it was given gradients
  /// How fused optimizers step the weight, where they do not step the tensor itself.
  const StepMethod* step_method = nullptr;

  /// The dtype of gradients and of optimizer state for `weight`.
  virtual at::ScalarType step_dtype(const at::Tensor& weight) const { return weight.scalar_type(); }
  /// Throws where the weight has a step_method, for an optimizer that does not ask for one.
  virtual void refuse_plain_step(ErrorPlace /*where*/) const {}
  /// The program has dropped the gradient.
  virtual void note_gradient_dropped() {}
};

/// An optimizer that steps weights by their step_method.
struct HeedsStepMethods {
 protected:
  HeedsStepMethods() = default;
  virtual ~HeedsStepMethods() = default;
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
    const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();  // grad() may warn
    return gradient.defined() && f(gradient);
  });
}
inline bool any_gradient(const torch::optim::Optimizer& optimizer) {
  return any_gradient(optimizer, [](const at::Tensor&) { return true; });
}

/// Null for most tensors.
inline WeightMeta* weight_meta_of(const at::Tensor& tensor) {
  c10::BackendMeta* const meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return meta ? dynamic_cast<WeightMeta*>(meta) : nullptr;
}

/// Null for what is stepped as it is.
inline const StepMethod* step_method_of(const at::Tensor& weight) {
  const WeightMeta* const meta = weight_meta_of(weight);
  return meta ? meta->step_method : nullptr;
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

/// Throws where `optimizer` would step the tensor `parameter`, which is not all there is to step.
inline void check_steps(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                        ErrorPlace where) {
  const WeightMeta* const meta = weight_meta_of(parameter);
  if (!meta || dynamic_cast<const HeedsStepMethods*>(&optimizer)) return;
  meta->refuse_plain_step(where);
}

/// How often this thread has moved gradients to master weights.
inline uint64_t& gradients_taken() {
  static thread_local uint64_t times = 0;
  return times;
}
/// Whether masters that `optimizer` steps were given gradients after the first `times` of these.
inline bool any_taken_after(const torch::optim::Optimizer& optimizer, uint64_t times) {
  return any_parameter(optimizer, [&](const at::Tensor& parameter) {
    const WeightMeta* const meta = weight_meta_of(parameter);
    return meta && meta->taken > times;
  });
}

// ---- Shards -------------------------------------------------------------------------------------

/// Null for what is no piece of a master.
inline std::shared_ptr<Shards> shards_of(const at::Tensor& tensor) {
  const WeightMeta* const meta = weight_meta_of(tensor);
  return meta ? meta->shards : nullptr;
}

/// What the optimizer's parameters are pieces of; null if they are none. An error for an optimizer
/// that cannot step pieces, and for one of weights that have masters.
inline std::shared_ptr<Shards> shards_of(const torch::optim::Optimizer& optimizer,
                                         const char* call) {
  std::shared_ptr<Shards> shards;
  any_parameter(optimizer, [&](const at::Tensor& tensor) {
    const WeightMeta* const meta = weight_meta_of(tensor);
    if (!meta) return false;
    TORCH_CHECK(!meta->has_master_apart || meta->masters.expired(), call, ": the parameter ",
                tensor.sizes(),
                " of this optimizer is a weight of a model under master weights, which would "
                "overwrite what a step makes of it. Give the optimizer their parameters().");
    shards = meta->shards;
    return shards != nullptr;
  });
  if (shards) shards->check(optimizer, call);
  return shards;
}

/// The shards that tensors with a gradient are pieces of. Throws if only some are, or of others,
/// since nobody knows their common norm.
class CommonShards {
 public:
  explicit CommonShards(const char* call) : call_(call) {}
  CommonShards& add(at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->grad().defined()) continue;
      const WeightMeta* const meta = weight_meta_of(tensor);
      Shards* const own = meta ? meta->shards.get() : nullptr;
      TORCH_CHECK_VALUE(is_first_ || own == shards_, call_,
                        ": some parameters are pieces of ShardedMasterWeights, and others are not, "
                        "or are those of another model. Clip them apart.");
      shards_ = own;
      is_first_ = false;
    }
    return *this;
  }
  /// Null if they are no pieces.
  const Shards* get() const { return shards_; }

 private:
  const char* call_;
  Shards* shards_ = nullptr;
  bool is_first_ = true;
};

}  // namespace torchamp::detail
