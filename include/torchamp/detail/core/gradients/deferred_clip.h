// SPDX-License-Identifier: BSD-3-Clause
// A clip that the next step of a fused optimizer applies.
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

namespace TORCHAMP_NAMESPACE::detail {

// Note [What was clipped is what is stepped]
// A deferred clip is a number, the divisor, and a Snapshot of the gradients from which the divisor
// was computed. So no device must be read to check whether they are unchanged.
//
// Compared with the Snapshot, the gradients at the step are
//   the same         the step divides by the divisor
//   gone             none of them exists any more. Either zero_grad() has dropped them and a new
//                    backward has made others: then the divisor is dropped. Or the program has
//                    replaced them by tensors computed from them: then it is an error. It is the
//                    first case if this thread has recorded a graph for autograd meanwhile.
//   something else   an error: some were written to, replaced, dropped or added.
// After the library's own writes (the check, GradScaler::unscale_) the divisor still applies. It is
// dropped by the step, taken or skipped; by zero_grad() of the fused optimizer; by the next clip,
// if the gradients are gone; and by clip_grad_value_, which applies it first.

/// A divisor for gradients.
struct Divisor {
  at::Tensor number{};           ///< 0-dim fp32; undefined if there is none
  bool may_be_infinite = false;  ///< on purpose, to make gradients of 0
  /// Whether the number is not finite if a gradient is not, or if a gradient is too large for the
  /// division by the scale.
  bool shows_non_finite = false;
  at::Tensor norm{};  ///< then checked too, on devices whose ops lose NaNs
  /// Whether the clip was called without a scaler, so it used the gradients unchanged.
  bool names_no_scaler = false;

  bool defined() const { return number.defined(); }

  /// The product with `factor`, if that is defined, on its device.
  at::Tensor times(const at::Tensor& factor) const {
    if (!factor.defined()) return number;
    if (!defined()) return factor;
    return factor.mul(to_device_async(factor.device(), number));
  }
};

/// The divisor for an optimizer's gradients that the next step applies.
class DeferredClip {
  /// The gradients that there are, in the optimizer's order.
  static auto walk(const torch::optim::Optimizer& optimizer) {
    return [&optimizer](const auto& f) { return any_gradient(optimizer, f); };
  }

 public:
  /// Records `divisor` for the present gradients, in addition to their pending divisor. Error: the
  /// pending divisor belongs to other gradients, some of which still exist.
  void add(const torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    const Divisor before = pending_for(optimizer);
    divisor_ = divisor;  // with shows_non_finite: its clip has read the same gradients
    if (before.defined()) {
      divisor_.number = divisor.times(before.number);
      divisor_.names_no_scaler = before.names_no_scaler || divisor.names_no_scaler;
      divisor_.may_be_infinite = before.may_be_infinite || divisor.may_be_infinite;
    }
    clipped_ = Snapshot(walk(optimizer));
    graphs_ = at::sequence_number::peek();
  }

  /// The divisor of the present gradients; undefined if there is none.
  Divisor pending_for(const torch::optim::Optimizer& optimizer) const {
    if (!divisor_.defined()) return {};
    const Clipped clipped = what_became_of_clipped(optimizer);
    TORCHAMP_CHECK(clipped != Clipped::changed, message);
    return clipped == Clipped::same ? divisor_ : Divisor();
  }

  /// The same for a step. Error: the program has replaced the clipped gradients by the present
  /// ones.
  Divisor pending_for_step(const torch::optim::Optimizer& optimizer) const {
    Divisor divisor = pending_for(optimizer);
    if (divisor.defined() || !divisor_.defined()) return divisor;
    // The clipped gradients are gone. The present ones come from a backward, or were computed from
    // them.
    const bool may_be_of_backward = at::sequence_number::peek() != graphs_;
    TORCHAMP_CHECK(may_be_of_backward || !any_gradient(optimizer), message);
    return {};
  }

  /// Whether a clip without a scaler is pending.
  bool has_named_no_scaler(const torch::optim::Optimizer& optimizer) const {
    return divisor_.names_no_scaler && is_pending_for(optimizer);
  }
  /// Whether a divisor is pending for exactly the present gradients.
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

  /// The present state of the clipped gradients.
  enum class Clipped {
    same,     ///< the optimizer has exactly these, unchanged
    gone,     ///< it has none of them
    changed,  ///< it has some of them, written to or together with others
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
  uint64_t graphs_ = 0;  // nodes that this thread had recorded at the clip
};

/// The divisor of a scaler's step: the scale times the divisor of a deferred clip.
struct StepDivisor {
  at::Tensor product{};  ///< undefined if the gradients are unscaled
  Divisor clip{};        ///< the clip's part; undefined if there is none, or the step multiplies
};

/// An optimizer whose step divides by the divisors of deferred clips, and steps weights by their
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

/// The divisor for the optimizer's gradients in its next step; undefined if there is none.
inline Divisor deferred_divisor_of(torch::optim::Optimizer& optimizer) {
  const DeferredClip* const clip = find_deferred_clip(optimizer);
  return clip ? clip->pending_for(optimizer) : Divisor();
}

/// Records that the library has changed the gradients' values, and that `divisor` still applies.
inline void keep_deferred(DeferredClip& clip, const torch::optim::Optimizer& optimizer,
                          const Divisor& divisor) {
  clip.forget();
  clip.add(optimizer, divisor);
}

/// Steps for a scaler, unless `found_inf` (0 or 1) is 1. Returns the result of the optimizer's
/// step. torchamp's optimizers get the clip's part of the divisor separately, others only the
/// product.
inline at::Tensor call_scaled_step(ScaledStep& optimizer, const StepDivisor& divisor,
                                   const at::Tensor& found_inf) {
  auto* const clipping = dynamic_cast<ClippingStep*>(&optimizer);
  if (!clipping) return optimizer.step_scaled(divisor.product, found_inf);
  clipping->step_with_clip(divisor, found_inf);
  return {};
}

}  // namespace TORCHAMP_NAMESPACE::detail
