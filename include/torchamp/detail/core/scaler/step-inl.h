// SPDX-License-Identifier: BSD-3-Clause
// What step does before an optimizer steps: unscales or divides later, and finds infs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"
#include "torchamp/detail/core/gradients/multiply.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/detail/core/scaler/agreement-inl.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// ---- Errors of calls in a wrong order -----------------------------------------------------------

/// Whether gradients came after unscale_. `moved`: move_gradients() has given masters some since.
inline bool any_came_later(const torch::optim::Optimizer& optimizer, const OptimizerState& state,
                           bool moved) {
  if (moved) return true;
  // Additional gradients are the program's own, for example zeros for a parameter.
  return !state.had_gradients && count_gradients(optimizer) > state.gradients;
}

/// Throws unless what unscale_ has divided and checked is what there is.
inline void check_complete(const torch::optim::Optimizer& optimizer, const OptimizerState& state,
                           const StepLedger& ledger) {
  const bool moved = state.moved != gradients_moved() && any_moved_after(optimizer, state.moved);
  TORCHAMP_CHECK(
      !any_came_later(optimizer, state, moved),
      "GradScaler::step: gradients came after unscale_, so they were neither unscaled nor checked. "
      "Complete them first: ",
      moved ? "call MasterWeights::take_gradients() before unscale_, and with an Accumulation in "
              "before_unscale."
            : "unscale_ found none at all.");
  const std::scoped_lock lock(ledger.backward->mutex);
  TORCHAMP_CHECK(!ledger.backward->divided.any_new_parameter(optimizer),
                 "GradScaler::step: a parameter with a gradient was added to this optimizer after "
                 "unscale_, so the gradient was neither unscaled nor checked. Add groups and "
                 "parameters before unscale_. To continue, drop the gradients and call discard().");
  TORCHAMP_CHECK(
      ledger.use.was_read() || !ledger.backward->divided.any_mixed(optimizer),
      "GradScaler::step: backward() of a scaled loss has added to the gradients of this optimizer "
      "after unscale_, or after a clip that names the scaler. Unscale and clip after the last "
      "backward(). To continue, drop the gradients and call discard().");
}

// ---- Gradients that are divided before the step -------------------------------------------------

/// A graph may replay this step, and change the scale without the host. May be called twice.
inline void expect_replays(torch::optim::Optimizer& optimizer, LossScale& scale) {
  const auto* const captured = dynamic_cast<CapturedStep*>(&optimizer);
  if (GraphBody::is_running() || (captured && captured->may_be_captured())) scale.expect_replays();
}

TORCHAMP_BODY OptimizerState unscale_gradients(torch::optim::Optimizer& optimizer, LossScale& scale,
                                               const char* call) {
  const InternalOps guard;
  expect_replays(optimizer, scale);
  std::shared_ptr<Shards> shards = shards_of(optimizer, call);
  const auto batches = gradients_of(
      optimizer, scale.stays_at_one() ? HalfGradients::allowed : HalfGradients::refused, call);
  DeferredClip* const deferred = find_deferred_clip(optimizer);
  const Divisor clip = deferred ? deferred->pending_for(optimizer) : Divisor();
  at::Tensor found_inf = at::zeros({}, scale.scale().options());
  multiply_and_check(
      batches, [&](at::Device device) { return scale.inverse(device); }, found_inf);
  if (clip.defined()) {  // and need not show what is not finite, which was looked for here
    keep_deferred(*deferred, optimizer,
                  {.number = clip.number, .may_be_infinite = clip.may_be_infinite});
  }
  if (scale.may_be_below_one()) check_unscaled(batches, found_inf);
  return {.stage = OptimizerState::Stage::unscaled,
          .measured = scale.measure(std::move(found_inf), batches, Gradients::unscaled),
          .had_gradients = !batches.empty(),
          .gradients = count_gradients(optimizer),
          .moved = gradients_moved(),
          .shards = std::move(shards)};
}

/// For GradScalerOptions::recheck: looks at unscaled gradients once more, and leaves it to
/// agree_for_step to agree anew: see Note [What processes agree on].
inline void recheck_gradients(torch::optim::Optimizer& optimizer, OptimizerState& state,
                              const LossScale& scale) {
  using Agreement = OptimizerState::Agreement;
  if (state.agreement == Agreement::binding) return;
  const InternalOps guard;
  at::Tensor found_inf = state.measured.found_inf.tensor;
  // GradScaler::found_inf() has reached it, and given its caller this flag.
  if (state.agreement == Agreement::reached) found_inf = found_inf.clone();
  state.shards = shards_of(optimizer, "GradScaler::step");
  const auto batches = gradients_of(optimizer, HalfGradients::allowed, "GradScaler::step");
  state.had_gradients |= !batches.empty();
  check_unscaled(batches, found_inf);
  state.measured = scale.measure(std::move(found_inf), batches, Gradients::unscaled);
  state.agreement = Agreement::none;
}

// ---- Gradients that a fused step divides --------------------------------------------------------

// Note [A large scale and a clip]
//
// A fused step divides by one fp32 number: the scale times the divisor of a deferred clip, which is
// the norm over max_norm. If fp32 cannot hold the product, this counts as an overflow: the step is
// skipped, and the scale backs off until fp32 can hold it. On the host the product is checked
// directly; on a device the check of the gradients includes it.

/// What shows whether all gradients that a fused step divides are finite, and whether fp32 holds
/// the divisor.
enum class Evidence {
  overflow,     ///< on the host: fp32 does not hold the divisor
  all_finite,   ///< on the host: the divisor is finite, so each gradient is
  two_numbers,  ///< on a device: if the divisor and the norm are finite, each gradient is
  gradients,    ///< the gradients, and on a device the divisor
};

/// The cheapest evidence that there is. The divisor and the norm of a clip are evidence of the
/// gradients if Divisor::shows_non_finite says so: see Note [One read for norm and check].
inline Evidence evidence_of(const StepDivisor& divisor, const at::Tensor& scale) {
  const Divisor& clip = divisor.clip;
  if (!clip.defined()) return Evidence::gradients;
  if (divisor.product.is_cpu()) {
    const auto is_finite = [](const at::Tensor& number) {
      return std::isfinite(*number.const_data_ptr<float>());
    };
    if (is_finite(divisor.product)) {
      return clip.shows_non_finite ? Evidence::all_finite : Evidence::gradients;
    }
    const bool overflows = clip.number.is_cpu() && is_finite(clip.number) && is_finite(scale);
    return overflows ? Evidence::overflow : Evidence::gradients;
  }
  const bool is_here = clip.norm.defined() && clip.norm.device() == scale.device();
  return clip.shows_non_finite && !clip.may_be_infinite && is_here ? Evidence::two_numbers
                                                                   : Evidence::gradients;
}

/// Returns found_inf: 1 if a gradient, its quotient or the divisor is not finite.
inline at::Tensor find_infs(const std::vector<GradientBatch>& batches, const StepDivisor& divisor,
                            const LossScale& scale) {
  at::Tensor found_inf = at::zeros({}, scale.scale().options());
  switch (evidence_of(divisor, scale.scale())) {
    case Evidence::overflow:
      found_inf.fill_(1.);
      break;
    case Evidence::all_finite:
      break;
    case Evidence::two_numbers: {
      // The norm is the program's. The kernel multiplies it by 1, which is not to count as a write.
      const at::AutoDispatchBelowADInplaceOrView versions_stay;
      check_numbers({{found_inf.device(), at::kFloat}, {divisor.product, divisor.clip.norm}},
                    scale.one(), found_inf);
      break;
    }
    case Evidence::gradients: {
      // If the scale may be below 1, dividing by it may make an inf of a finite gradient.
      const at::Tensor divides = scale.may_be_below_one() ? scale.scale() : at::Tensor();
      const bool checks_divisor =
          divisor.clip.defined() && !divisor.clip.may_be_infinite && !divisor.product.is_cpu();
      check_before_division(batches,
                            {.scale = divides,
                             .number = checks_divisor ? divisor.product : at::Tensor(),
                             .one = scale.one()},
                            found_inf);
      break;
    }
  }
  return found_inf;
}

/// Checks gradients that a fused step divides; returns the divisor. A step that is tried again
/// checks again, because a failed capture has freed the memory of its flag. Exception: a step that
/// processes have agreed on, see Note [What processes agree on].
inline StepDivisor check_before_fused_step(torch::optim::Optimizer& optimizer, const Divisor& clip,
                                           OptimizerState& state, LossScale& scale) {
  using Agreement = OptimizerState::Agreement;
  const InternalOps guard;
  StepDivisor divisor{clip.times(scale.scale()), clip};
  state.shards = shards_of(optimizer, "GradScaler::step");
  const auto batches = gradients_of(optimizer, HalfGradients::allowed, "GradScaler::step");
  if (state.agreement == Agreement::binding) return divisor;
  state.agreement = Agreement::none;
  state.had_gradients = !batches.empty();
  state.measured = scale.measure(find_infs(batches, divisor, scale), batches, Gradients::scaled);
  return divisor;
}

// ---- A step, whoever divides --------------------------------------------------------------------

/// Unscales and checks what unscale_ has not, so that found_inf decides whether to step. Returns
/// the divisor of a `fused` step; nothing if the gradients are unscaled: then the step itself finds
/// a clip that is still pending (FusedOptimizer::step_and_forget_clip).
inline StepDivisor prepare_gradients(torch::optim::Optimizer& optimizer, bool fused,
                                     OptimizerState& state, LossScale& scale) {
  expect_replays(optimizer, scale);
  const bool is_unscaled = state.stage == OptimizerState::Stage::unscaled;
  const bool recheck = scale.options().recheck;
  if (fused && !is_unscaled && !recheck) {
    return check_before_fused_step(optimizer, deferred_divisor_of(optimizer), state, scale);
  }
  if (!is_unscaled) state = unscale_gradients(optimizer, scale, "GradScaler::step");
  if (recheck) recheck_gradients(optimizer, state, scale);
  return {};
}

}  // namespace TORCHAMP_NAMESPACE::detail
