// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/check_finite.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Whether dividing by the scale may make an inf of a finite gradient.
inline bool division_may_overflow(LossScale& scale, torch::optim::Optimizer& optimizer) {
  const auto* const captured = dynamic_cast<CapturedStep*>(&optimizer);
  if (GraphBody::is_running() || (captured && captured->may_be_captured())) scale.expect_replays();
  return scale.may_be_below_one();
}

TORCHAMP_COLD OptimizerState unscale_gradients(torch::optim::Optimizer& optimizer, LossScale& scale,
                                               const char* call) {
  const InternalOps guard;
  std::shared_ptr<Shards> shards = shards_of(optimizer, call);
  const auto batches = gradients_of(
      optimizer, scale.stays_at_one() ? HalfGradients::allowed : HalfGradients::refused, call);
  const Divisor left = ClipLeft::to(optimizer);
  // Computed here: the step that follows is not to run out of memory once this one is recorded.
  const Divisor divisor{left.value(), 0., left.is_number};
  at::Tensor found_inf = at::zeros({}, scale.scale().options());
  at::Tensor largest;
  const ScaleRule* const rule = scale.rule();
  if (rule) largest = rule->check_and_measure(batches, scale.scale(), found_inf);
  multiply_and_check(
      batches, [&](at::Device device) { return scale.inverse(device); }, found_inf);
  if (divisor.defined()) {  // a clip of the same gradients, still to be made
    ClipLeft::keep(optimizer, divisor);
  }
  const bool may_overflow = division_may_overflow(scale, optimizer);
  if (may_overflow && !rule) check(batches, found_inf);
  return {.stage = OptimizerState::Stage::unscaled,
          .found_inf = {std::move(found_inf), std::nullopt},
          .largest = std::move(largest),
          .had_gradients = !batches.empty(),
          .exact = true,
          .gradients = count_gradients(optimizer),
          .taken = gradients_taken(),
          .shards = std::move(shards)};
}

/// Checks the gradients and leaves them as they are. `as_if_divided`: by the scale. `clip`: what is
/// left to the step, if anything is; `grad_scale`: what the step divides by then.
inline void check_gradients(torch::optim::Optimizer& optimizer, OptimizerState& state,
                            LossScale& scale, bool as_if_divided, const Divisor& clip = {},
                            const at::Tensor& grad_scale = {}) {
  const InternalOps guard;
  state.shards = shards_of(optimizer, "GradScaler::step");
  const auto divides_in_place = [&] {
    return grad_scale.defined() && (clip.defined() || !scale.stays_at_one()) &&
           ClipLeft::can_be_left_to(optimizer);
  };
  const auto batches =
      gradients_of(optimizer, HalfGradients::allowed, "GradScaler::step", divides_in_place);
  state.had_gradients |= !batches.empty();
  at::Tensor& found_inf = state.found_inf.tensor;
  if (!found_inf.defined()) state.exact = true;
  const at::Device home = scale.scale().device();
  const bool on_host = grad_scale.is_cpu();
  const at::Tensor number =
      clip.defined() && clip.is_number && !on_host ? grad_scale : at::Tensor();
  const auto make_flag = [&](const at::Tensor& zero = {}) {
    if (found_inf.defined()) return;
    const bool is_here = zero.defined() && zero.device() == home;
    found_inf = is_here ? zero : at::zeros({}, scale.scale().options());
  };
  const ScaleRule* const rule = scale.rule();
  if (rule && state.stage == OptimizerState::Stage::ready) {
    make_flag();
    state.largest = rule->check_and_measure(batches, scale.scale(), found_inf);
    if (number.defined()) look_at({{home, at::kFloat}, {number}}, scale.one(), found_inf);
  } else if (clip.tells_finite && on_host && !found_inf.defined() &&
             std::isfinite(*grad_scale.const_data_ptr<float>())) {
    make_flag();
  } else if (clip.tells_finite && number.defined() && clip.norm.defined() &&
             clip.norm.device() == home) {
    make_flag(clip.zero);
    const at::AutoDispatchBelowADInplaceOrView versions_stay;
    look_at({{home, at::kFloat}, {number, clip.norm}}, scale.one(), found_inf);
  } else {
    check(batches, found_inf, home,
          {.zero = scale.zero(),
           .one = scale.one(),
           .scale = as_if_divided ? scale.scale() : at::Tensor(),
           .number = number});
  }
}

}  // namespace torchamp::detail
