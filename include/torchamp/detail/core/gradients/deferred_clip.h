// SPDX-License-Identifier: BSD-3-Clause
// A clip that is left to the next step of a fused optimizer.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstdint>

#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [What was clipped is what is stepped]
// A deferred clip is a number, the divisor, and a Snapshot of the gradients it was computed from,
// so no device has to be asked whether they are unchanged.
//
// The gradients that a step finds are
//   the same         the step divides by the divisor
//   gone             none of them is there any more. Either zero_grad() has dropped them and a new
//                    backward has made others, and the divisor is forgotten; or the program has
//                    replaced them by what it computed from them, which is an error. What tells the
//                    two apart is whether this thread has recorded a graph for autograd meanwhile.
//   something else   an error: some were written to, replaced, dropped or added to.
// Writes that leave the clipped gradients what they are (the check, GradScaler::unscale_) keep the
// divisor. It ends with the step, taken or skipped; with zero_grad() of the fused optimizer; with
// the next clip, if the gradients are gone; and where clip_grad_value_ applies it.

/// A number that gradients are to be divided by.
struct Divisor {
  at::Tensor number{};           ///< 0-dim fp32; undefined if there is none
  bool may_be_infinite = false;  ///< on purpose, to make gradients of 0
  /// Whether it is not finite where a gradient is not, or is too large to be divided by the scale.
  bool shows_non_finite = false;
  at::Tensor norm{};  ///< then to be checked with it, on devices whose ops lose NaNs
  /// Whether the clip has named no scaler, and took the gradients as they are.
  bool names_no_scaler = false;

  bool defined() const { return number.defined(); }

  /// The product with `factor`, on its device, where it is defined.
  at::Tensor times(const at::Tensor& factor) const {
    if (!factor.defined()) return number;
    if (!defined()) return factor;
    return factor.mul(to_device_async(factor.device(), number));
  }
};

/// What the gradients of an optimizer are still to be divided by when they are next stepped with.
class DeferredClip {
  /// The gradients that there are, in the optimizer's order.
  static auto walk(const torch::optim::Optimizer& optimizer) {
    return [&optimizer](const auto& f) { return any_gradient(optimizer, f); };
  }

 public:
  /// Notes that the gradients that are there now are to be divided by `divisor`, on top of what is
  /// pending for them. An error if that was left for others, unless these are all gone.
  void add(const torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    const Divisor before = pending_for(optimizer);
    divisor_ = divisor;  // also what it shows: its clip has read the same gradients
    if (before.defined()) {
      divisor_.number = divisor.times(before.number);
      divisor_.names_no_scaler = before.names_no_scaler || divisor.names_no_scaler;
      divisor_.may_be_infinite = before.may_be_infinite || divisor.may_be_infinite;
    }
    clipped_ = Snapshot(walk(optimizer));
    graphs_ = at::sequence_number::peek();
  }

  /// The divisor of the gradients that are there now; undefined if there is none.
  Divisor pending_for(const torch::optim::Optimizer& optimizer) const {
    if (!divisor_.defined()) return {};
    const Clipped clipped = what_became_of_clipped(optimizer);
    TORCHAMP_CHECK(clipped != Clipped::changed, message);
    return clipped == Clipped::same ? divisor_ : Divisor();
  }

  /// The same for a step with them; an error if they were put in the clipped ones' place.
  Divisor pending_for_step(const torch::optim::Optimizer& optimizer) const {
    Divisor divisor = pending_for(optimizer);
    if (divisor.defined() || !divisor_.defined()) return divisor;
    // The clipped ones are gone. Others can only have come from a backward, or from them.
    const bool may_be_of_backward = at::sequence_number::peek() != graphs_;
    TORCHAMP_CHECK(may_be_of_backward || !any_gradient(optimizer), message);
    return {};
  }

  /// Whether one is pending of a clip that has named no scaler.
  bool has_named_no_scaler(const torch::optim::Optimizer& optimizer) const {
    return divisor_.names_no_scaler && is_pending_for(optimizer);
  }
  /// Whether a divisor is pending for just the gradients that are there now.
  bool is_pending_for(const torch::optim::Optimizer& optimizer) const {
    return divisor_.defined() && are_same(optimizer);
  }

  void forget() {
    divisor_ = {};
    clipped_.clear();
  }

 private:
  static constexpr const char* message =
      "FusedOptimizer: the gradients are not those that clip_grad_norm_ has clipped and left to "
      "the next step: since then some were written to, replaced, dropped or added. Clip after the "
      "last such change, just before the step. To drop what was clipped, call the fused "
      "optimizer's own zero_grad() or take_next_step_divisor().";

  /// What has become of the gradients that were clipped.
  enum class Clipped {
    same,     ///< the optimizer has just these, as they were
    gone,     ///< it has none of them
    changed,  ///< it has some of them, written to or among others
  };
  Clipped what_became_of_clipped(const torch::optim::Optimizer& optimizer) const {
    if (are_same(optimizer)) return Clipped::same;
    return is_any_there(optimizer) ? Clipped::changed : Clipped::gone;
  }

  bool are_same(const torch::optim::Optimizer& optimizer) const {
    return clipped_.is_same(walk(optimizer));
  }
  bool is_any_there(const torch::optim::Optimizer& optimizer) const {
    return any_gradient(optimizer,
                        [this](const at::Tensor& gradient) { return clipped_.contains(gradient); });
  }

  Divisor divisor_;
  Snapshot clipped_;
  uint64_t graphs_ = 0;  // nodes that this thread had recorded then
};

/// What the step of a scaler divides gradients by: the scale times what a clip has deferred.
struct StepDivisor {
  at::Tensor product{};  ///< undefined if the gradients are unscaled
  Divisor clip{};        ///< the clip's part; undefined if there is none, or the step multiplies
};

/// An optimizer whose step divides by what clips have left to it, and steps weights by their
/// step_method.
class ClippingStep : public ScaledStep {
 protected:
  /// step_scaled() for a scaler. `found_inf` is 0 or 1.
  virtual void step_with_clip(const StepDivisor& divisor, const at::Tensor& found_inf) = 0;

  DeferredClip deferred_clip_;

 private:
  friend DeferredClip* find_deferred_clip(torch::optim::Optimizer&);
  friend const DeferredClip* find_deferred_clip(const torch::optim::Optimizer&);
  friend at::Tensor call_scaled_step(ScaledStep&, const StepDivisor&, const at::Tensor&);
};

/// Null for an optimizer whose gradients a clip has to multiply at once.
inline DeferredClip* find_deferred_clip(torch::optim::Optimizer& optimizer) {
  auto* const step = dynamic_cast<ClippingStep*>(&optimizer);
  return step ? &step->deferred_clip_ : nullptr;
}

inline const DeferredClip* find_deferred_clip(const torch::optim::Optimizer& optimizer) {
  const auto* const step = dynamic_cast<const ClippingStep*>(&optimizer);
  return step ? &step->deferred_clip_ : nullptr;
}

/// What the optimizer's gradients are to be divided by in its next step; undefined for nothing.
inline Divisor deferred_divisor_of(torch::optim::Optimizer& optimizer) {
  const DeferredClip* const clip = find_deferred_clip(optimizer);
  return clip ? clip->pending_for(optimizer) : Divisor();
}

/// The same gradients have other values now, but are to be divided by `divisor` still.
inline void keep_deferred(DeferredClip& clip, const torch::optim::Optimizer& optimizer,
                          const Divisor& divisor) {
  clip.forget();
  clip.add(optimizer, divisor);
}

/// Steps for a scaler, unless `found_inf`, which is 0 or 1, is 1; what the optimizer's step
/// returns. Torchamp's optimizers are told the clip's part of the divisor, others only the product.
inline at::Tensor call_scaled_step(ScaledStep& optimizer, const StepDivisor& divisor,
                                   const at::Tensor& found_inf) {
  auto* const clipping = dynamic_cast<ClippingStep*>(&optimizer);
  if (!clipping) return optimizer.step_scaled(divisor.product, found_inf);
  clipping->step_with_clip(divisor, found_inf);
  return {};
}

}  // namespace torchamp::detail
