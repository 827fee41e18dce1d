// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <optional>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"
#include "torchamp/detail/core/scaler/check_gradients-inl.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/misuse.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [A large scale and a clip]
//
// A fused step divides by one fp32 number, the scale times what a clip has left to it, which is the
// norm of the scaled gradients over max_norm: more than fp32 may hold where the scale is large. So
// where it may be above 2^32, gradients to be clipped are divided by the scale in the pass that
// checks them, which costs nothing more, and the step divides by the rest. (Not fp16 gradients,
// which that would ruin: they are too small for it to matter.)
//
// At a lower scale it takes gradients whose norm is above 2^96 max_norm. On the host the product is
// looked at, and such gradients are divided as above, or the step skipped where some are fp16. On a
// device, the check of the gradients looks at the product, too: if fp32 cannot hold it, the step is
// skipped and the scale lowered, until it can.

/// Whether the scale times `clip`, both on the host, is more than fp32 holds.
inline bool product_overflows(const LossScale& scale, const Divisor& clip) {
  if (!clip.defined() || !clip.number.is_cpu() || !scale.scale().is_cpu()) return false;
  const float one = *scale.scale().const_data_ptr<float>();
  const float other = *clip.number.const_data_ptr<float>();
  return std::isfinite(one) && std::isfinite(other) && !std::isfinite(one * other);
}

/// Whether the scale times `clip`, which is left to the step of `optimizer`, may be more than fp32
/// holds, and the gradients can be divided before.
inline bool clip_may_overflow(LossScale& scale, const Divisor& clip,
                              const torch::optim::Optimizer& optimizer) {
  if (!clip.defined()) return false;
  constexpr double largest_safe_scale = 0x1p32;
  return (scale.may_exceed(largest_safe_scale) || product_overflows(scale, clip)) &&
         !has_half_gradients(optimizer);
}

TORCHAMP_COLD void check_not_stepped(const OptimizerState& state) {
  TORCHAMP_CHECK(!state.in_closure,
                 "GradScaler::step: the closure of this optimizer's step has called step(). Let it "
                 "only compute and return the loss.");
  TORCHAMP_CHECK(state.stage != OptimizerState::Stage::stepped,
                 "GradScaler::step: this optimizer has been stepped already. Call update() once "
                 "all optimizers have been stepped. (If an exception came before update(), call "
                 "discard(optimizer).)");
}

/// Whether what unscale_ has divided and checked is what there is. (Gradients that the program
/// makes up by itself, zeros for a parameter that has none, say, are its own business.)
inline void check_complete(const torch::optim::Optimizer& optimizer, const OptimizerState& state,
                           const StepOrder& order) {
  const bool moved = state.moved != gradients_moved();
  TORCHAMP_CHECK(
      ((!moved && state.had_gradients) || count_gradients(optimizer) <= state.gradients) &&
          !(moved && any_moved_after(optimizer, state.moved)),
      "GradScaler::step: gradients came after unscale_, so they were neither unscaled nor checked. "
      "Complete them first: ",
      moved ? "call MasterWeights::take_gradients() before unscale_, and with an Accumulation in "
              "before_unscale."
            : "unscale_ found none at all.");
  TORCHAMP_CHECK(
      order.was_asked() || !order.backward->any_added(optimizer),
      "GradScaler::step: backward() of a scaled loss has added to the gradients of this optimizer "
      "after unscale_, or after a clip that names the scaler. Unscale and clip after the last "
      "backward(). To continue, drop the gradients and call discard().");
}

TORCHAMP_BODY void note_written(const torch::optim::Optimizer& optimizer) {
  any_parameter(optimizer, [](const at::Tensor& param) {
    const bool stepped = gradient_of(param).defined();
    if (stepped && weight_meta_of(param)) param.unsafeGetTensorImpl()->bump_version();
    return false;
  });
}

/// What a fused step is left to do.
struct LeftToStep {
  at::Tensor grad_scale{};     ///< to divide by; undefined if the gradients are unscaled
  bool clip_in_scale = false;  ///< which holds what a clip has left
};

/// Brings `state` to where the step can be decided, unless it is there: checks the gradients and,
/// unless a `fused` step is to do that, divides them.
inline LeftToStep check_for_step(torch::optim::Optimizer& optimizer, bool fused,
                                 OptimizerState& state, LossScale& scale) {
  const bool recheck = scale.options().recheck;
  const bool is_ready = state.stage == OptimizerState::Stage::ready;
  const bool may_overflow = division_may_overflow(scale, optimizer);
  if (is_ready && fused && !recheck) {
    const Divisor clip = DeferredClips::of(optimizer);
    if (!clip_may_overflow(scale, clip, optimizer)) {
      StepDivisor divisor{clip};
      {
        const InternalOps guard;
        divisor.grad_scale = clip.times(scale.scale());
      }
      // A step that is tried again looks anew: a failed capture has taken its flag's memory with
      // it.
      if (!state.agreed) state.found_inf = {};
      check_for_fused_step(optimizer, state, scale, may_overflow, divisor);
      if (product_overflows(scale, clip)) state.found_inf.tensor.fill_(1.);
      return {divisor.grad_scale, clip.defined()};
    }
  }
  if (is_ready) state = unscale_gradients(optimizer, scale, "GradScaler::step");
  if (recheck && !state.rechecked) {
    if (state.agreed) state.found_inf = {state.found_inf.tensor.clone(), std::nullopt};
    recheck_gradients(optimizer, state, scale);
    state.agreed = false;
  }
  return {};
}

}  // namespace torchamp::detail
