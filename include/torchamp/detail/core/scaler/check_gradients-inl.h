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
  const Divisor clip = DeferredClips::of(optimizer);
  at::Tensor found_inf = at::zeros({}, scale.scale().options());
  at::Tensor amax;
  const ScaleRule* const rule = scale.rule();
  if (rule) amax = rule->check_and_measure(batches, scale.scale(), found_inf);
  multiply_and_check(
      batches, [&](at::Device device) { return scale.inverse(device); }, found_inf);
  if (clip.defined()) DeferredClips::keep(optimizer, {clip.number, clip.is_number});
  const bool may_overflow = division_may_overflow(scale, optimizer);
  if (may_overflow && !rule) check_finite(batches, found_inf, {.again = true});
  return {.stage = OptimizerState::Stage::unscaled,
          .found_inf = {std::move(found_inf), std::nullopt},
          .amax = std::move(amax),
          .had_gradients = !batches.empty(),
          .exact = true,
          .gradients = count_gradients(optimizer),
          .moved = gradients_moved(),
          .shards = std::move(shards)};
}

// ---- Checks that leave the gradients as they are ------------------------------------------------

/// Checks gradients that have been unscaled once more.
inline void recheck_gradients(torch::optim::Optimizer& optimizer, OptimizerState& state,
                              const LossScale& scale) {
  const InternalOps guard;
  state.shards = shards_of(optimizer, "GradScaler::step");
  const auto batches = gradients_of(optimizer, HalfGradients::allowed, "GradScaler::step");
  state.had_gradients |= !batches.empty();
  check_finite(batches, state.found_inf.tensor, {.one = scale.one(), .again = true});
}

/// What a fused step is to divide the gradients by.
struct StepDivisor {
  Divisor clip{};           ///< what a clip has left to the step, if anything
  at::Tensor grad_scale{};  ///< that times the scale

  /// The product, where it is on a device and has to be finite.
  at::Tensor number_on_device() const {
    return clip.defined() && clip.is_number && !grad_scale.is_cpu() ? grad_scale : at::Tensor();
  }
};

/// Whether the host sees by the product that all gradients are finite: see Note [One read for norm
/// and check].
inline bool is_finite_on_host(const StepDivisor& divisor) {
  return divisor.clip.tells_finite && divisor.grad_scale.is_cpu() &&
         std::isfinite(*divisor.grad_scale.const_data_ptr<float>());
}

/// Whether a device can see that by the product and the norm.
inline bool tells_finite_on(at::Device device, const StepDivisor& divisor) {
  const at::Tensor& norm = divisor.clip.norm;
  return divisor.clip.tells_finite && divisor.number_on_device().defined() && norm.defined() &&
         norm.device() == device;
}

/// The gradients of an optimizer whose fused step divides them. An error if it would divide one
/// twice.
inline std::vector<GradientBatch> gradients_of_fused_step(torch::optim::Optimizer& optimizer,
                                                          LossScale& scale,
                                                          const StepDivisor& divisor) {
  const auto divides_in_place = [&] {
    return (divisor.clip.defined() || !scale.stays_at_one()) &&
           DeferredClips::can_be_left_to(optimizer);
  };
  return gradients_of(optimizer, HalfGradients::allowed, "GradScaler::step", divides_in_place);
}

/// Checks the gradients of an optimizer whose fused step divides them. `may_overflow`: dividing by
/// the scale may make an inf of a finite one, which counts, too.
inline void check_for_fused_step(torch::optim::Optimizer& optimizer, OptimizerState& state,
                                 LossScale& scale, bool may_overflow, const StepDivisor& divisor) {
  const InternalOps guard;
  state.shards = shards_of(optimizer, "GradScaler::step");
  const auto batches = gradients_of_fused_step(optimizer, scale, divisor);
  state.had_gradients |= !batches.empty();
  at::Tensor& found_inf = state.found_inf.tensor;
  if (!found_inf.defined()) {
    found_inf = at::zeros({}, scale.scale().options());
    state.exact = true;
  }
  const at::Device home = scale.scale().device();
  const at::Tensor number = divisor.number_on_device();
  if (const ScaleRule* const rule = scale.rule()) {
    state.amax = rule->check_and_measure(batches, scale.scale(), found_inf);
    if (number.defined()) check_numbers({{home, at::kFloat}, {number}}, scale.one(), found_inf);
  } else if (is_finite_on_host(divisor)) {
    return;
  } else if (tells_finite_on(home, divisor)) {
    const at::AutoDispatchBelowADInplaceOrView versions_stay;
    check_numbers({{home, at::kFloat}, {number, divisor.clip.norm}}, scale.one(), found_inf);
  } else {
    check_finite(batches, found_inf,
                 {.one = scale.one(),
                  .scale = may_overflow ? scale.scale() : at::Tensor(),
                  .number = number,
                  .again = state.stage != OptimizerState::Stage::ready});
  }
}

}  // namespace torchamp::detail
