// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/rsub.h>
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

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// ---- What a weight carries ----------------------------------------------------------------------

// Note [Weights that carry something]
// Master weights hang a WeightMeta at the TensorImpl of a weight, so that whoever is given the
// weight finds it, and so that it lives as long as the weight. Gradients, optimizers and the scaler
// know no more of masters than what stands here: who must agree on an overflow and on a norm, and
// how the weight is stepped.

class StepMethod;
class Shards;  // in detail/core/scaler/step_ledger.h

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
  /// Throws where the weight has a step_method, for an optimizer that does not go by it.
  virtual void refuse_plain_step(ErrorPlace /*where*/) const {}
  /// The program has dropped the gradient.
  virtual void note_gradient_dropped() {}
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

// ---- What an optimizer carries ------------------------------------------------------------------

// Note [What was clipped is what is stepped]
// A deferred clip is a number, the divisor, and a list of the gradients it was computed from, each
// by identity and version, so no device has to be asked whether they are unchanged. The list keeps
// no gradient alive, but while it exists no other tensor can get one's address.
//
// The gradients that a step finds are
//   the same         the step divides by the divisor
//   gone             none of them is there any more. Either zero_grad() has dropped them and a new
//                    backward has made others, and the divisor is forgotten; or the program has
//                    replaced them by what it computed from them, which is an error. What tells the
//                    two apart is whether this thread has recorded a graph for autograd meanwhile.
//   something else   an error: some were written to, replaced, dropped or added to.
// Writes that leave the clipped gradients what they are (the check, GradScaler::unscale_) keep the
// divisor.

/// A number that gradients are to be divided by.
struct Divisor {
  at::Tensor number{};     ///< 0-dim fp32; undefined if there is none
  double per_excess = 0.;  ///< if not 0, the divisor is 1 + per_excess * number, in one kernel less
  bool is_number = true;   ///< or else it may be inf, to make gradients of 0
  /// Whether it is not finite where a gradient is not, or is too large to be divided by the scale.
  bool tells_finite = false;
  at::Tensor norm{};  ///< with tells_finite: tells as well, on devices whose ops lose NaNs
  at::Tensor zero{};  ///< 0-dim fp32 on the number's device, new, for a flag; or undefined

  bool defined() const { return number.defined(); }

  /// 0-dim fp32; undefined if there is none.
  at::Tensor value() const {
    return defined() && per_excess != 0. ? at::rsub(number, 1., -per_excess) : number;
  }

  /// The product with `factor`, on its device, where it is defined.
  [[gnu::cold]] at::Tensor times(const at::Tensor& factor) const {
    if (!factor.defined()) return value();
    if (!defined()) return factor;
    const at::Tensor here = to_device_async(factor.device(), number);
    return per_excess != 0. ? at::addcmul(factor, here, factor, per_excess) : factor.mul(here);
  }
};

/// What the gradients of an optimizer are still to be divided by when they are next stepped with.
class DeferredClip {
 public:
  /// Divides the gradients that are there now by `divisor`, on top of what is pending for them. An
  /// error if that was left for others, unless these are all gone.
  [[gnu::cold]] void add(const torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    const Divisor before = of(optimizer);
    divisor_ = divisor;
    if (before.defined()) {
      divisor_.number = divisor.times(before.value());
      divisor_.per_excess = 0.;
      divisor_.is_number = before.is_number && divisor.is_number;
    }
    clipped_.clear();
    any_gradient(optimizer, [&](const at::Tensor& gradient) {
      clipped_.emplace_back(gradient);
      return false;
    });
    graphs_ = at::sequence_number::peek();
  }

  /// The divisor of the gradients that are there now; undefined if there is none.
  Divisor of(const torch::optim::Optimizer& optimizer) const {
    if (!divisor_.defined()) return {};
    const Match match = compare(optimizer);
    TORCH_CHECK(match != Match::different, message);
    return match == Match::same ? divisor_ : Divisor();
  }

  /// The same for a step with them; an error if they were put in the clipped ones' place.
  Divisor for_step(const torch::optim::Optimizer& optimizer) const {
    Divisor divisor = of(optimizer);
    TORCH_CHECK(divisor.defined() || !divisor_.defined() || !any_gradient(optimizer) ||
                    at::sequence_number::peek() != graphs_,
                message);
    return divisor;
  }

  /// Whether a divisor is pending for just the gradients that are there now.
  bool is_for(const torch::optim::Optimizer& optimizer) const {
    return divisor_.defined() && compare(optimizer) == Match::same;
  }

  void forget() {
    divisor_ = {};
    clipped_.clear();
  }

 private:
  enum class Match { same, gone, different };

  static constexpr const char* message =
      "FusedOptimizer: the gradients are not those that clip_grad_norm_ has clipped and left to "
      "the next step: since then some were written to, replaced, dropped or added. Clip after the "
      "last such change, just before the step. To drop what was clipped, call the fused "
      "optimizer's own zero_grad() or take_next_step_divisor().";

  Match compare(const torch::optim::Optimizer& optimizer) const {
    std::size_t next = 0;
    bool same = true, any = false;
    any_gradient(optimizer, [&](const at::Tensor& gradient) {
      same = same && next < clipped_.size() && clipped_[next].is_unchanged(gradient);
      any = any || same;
      for (std::size_t i = 0; !any && i < clipped_.size(); ++i) any = clipped_[i].is(gradient);
      ++next;
      return false;
    });
    if (same && next == clipped_.size()) return Match::same;
    return any ? Match::different : Match::gone;
  }

  Divisor divisor_;
  std::vector<SeenTensor> clipped_;  // the gradients
  uint64_t graphs_ = 0;              // nodes that this thread had recorded then
};

/// What a scaler knows of the step that it is making.
struct StepFacts {
  bool clip_in_scale = false;  ///< the scale holds what a clip has left to the step
  bool exact_flag = false;     ///< the flag is 0 or 1
};

/// What an optimizer is, beside torch::optim::Optimizer, whose step divides by what clips have left
/// to it and steps weights by their step_method.
class DefersClips : public ScaledStep {
 protected:
  /// step_scaled() for a scaler.
  virtual void step_knowing(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                            const StepFacts& facts) = 0;

  DeferredClip deferred_clip_;

 private:
  friend struct ClipLeft;
};

// ---- Casts of weights ---------------------------------------------------------------------------

/// Whom to tell that weights were written to; null if nobody keeps anything of them.
inline WeightsWritten find_weights_written() {
  static const c10::OperatorName name(weights_written_op, "");
  const auto found = c10::Dispatcher::singleton().findSchema(name);
  if (!found) return nullptr;
  const auto& address = found->schema().arguments()[0].default_value();
  return reinterpret_cast<WeightsWritten>(address->toInt());
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
    tell({});
    if (optimizer_ == nullptr) return;
    for (const auto& group : optimizer_->param_groups()) tell(group.params());
  }
  DropWeightCasts(const DropWeightCasts&) = delete;
  DropWeightCasts& operator=(const DropWeightCasts&) = delete;

 private:
  const torch::optim::Optimizer* optimizer_ = nullptr;
};

}  // namespace torchamp::detail
