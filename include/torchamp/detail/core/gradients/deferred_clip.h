// SPDX-License-Identifier: BSD-3-Clause
// A clip that is left to the next step of a fused optimizer.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace torchamp::detail {

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
// divisor. It ends with the step, taken or skipped; with zero_grad() of the fused optimizer; with
// the next clip, if the gradients are gone; and where clip_grad_value_ applies it.

/// A number that gradients are to be divided by.
struct Divisor {
  at::Tensor number{};    ///< 0-dim fp32; undefined if there is none
  bool is_number = true;  ///< or else it may be inf, to make gradients of 0
  /// Whether it is not finite where a gradient is not, or is too large to be divided by the scale.
  bool tells_finite = false;
  at::Tensor norm{};  ///< with tells_finite: tells as well, on devices whose ops lose NaNs

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
 public:
  /// Divides the gradients that are there now by `divisor`, on top of what is pending for them. An
  /// error if that was left for others, unless these are all gone.
  void add(const torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    const Divisor before = of(optimizer);
    divisor_ = divisor;
    if (before.defined()) {
      divisor_.number = divisor.times(before.number);
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
    TORCHAMP_CHECK(match != Match::different, message);
    return match == Match::same ? divisor_ : Divisor();
  }

  /// The same for a step with them; an error if they were put in the clipped ones' place.
  Divisor for_step(const torch::optim::Optimizer& optimizer) const {
    Divisor divisor = of(optimizer);
    TORCHAMP_CHECK(divisor.defined() || !divisor_.defined() || !any_gradient(optimizer) ||
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
  friend struct DeferredClips;
};

/// What clips leave to the next step of an optimizer.
struct DeferredClips {
  /// Undefined if there is nothing.
  static Divisor of(const torch::optim::Optimizer& optimizer) {
    const auto* const defers = dynamic_cast<const DefersClips*>(&optimizer);
    return defers ? defers->deferred_clip_.of(optimizer) : Divisor();
  }
  /// False if this optimizer's gradients have to be multiplied now.
  static bool can_be_left_to(const torch::optim::Optimizer& optimizer) {
    return dynamic_cast<const DefersClips*>(&optimizer) != nullptr;
  }
  /// On top of what is left already. Only where it can be.
  static void add(torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    const InternalOps internal;
    dynamic_cast<DefersClips&>(optimizer).deferred_clip_.add(optimizer, divisor);
  }
  /// The same gradients have other values now. Asks no device for memory.
  static void keep(torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    forget(optimizer);
    add(optimizer, divisor);
  }
  static void forget(torch::optim::Optimizer& optimizer) {
    if (auto* const defers = dynamic_cast<DefersClips*>(&optimizer)) {
      defers->deferred_clip_.forget();
    }
  }
  /// ScaledStep::step_scaled(); `facts` are for those who defer clips.
  static at::Tensor step_scaled(ScaledStep& optimizer, const at::Tensor& grad_scale,
                                const at::Tensor& found_inf, const StepFacts& facts) {
    auto* const defers = dynamic_cast<DefersClips*>(&optimizer);
    if (!defers) return optimizer.step_scaled(grad_scale, found_inf);
    defers->step_knowing(grad_scale, found_inf, facts);
    return {};
  }
};

}  // namespace torchamp::detail
