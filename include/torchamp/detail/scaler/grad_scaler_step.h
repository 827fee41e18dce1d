// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "torchamp/detail/gradients/deferred_clip.h"
#include "torchamp/detail/overlay/weight_casts.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY void GradScaler::check_not_stepped(const detail::OptimizerState& state) {
  TORCH_CHECK(!state.in_closure,
              "GradScaler::step: this optimizer is being stepped, and the closure of that step has "
              "called step(). Let the closure compute the loss and return it.");
  TORCH_CHECK(state.stage != detail::OptimizerState::Stage::stepped,
              "GradScaler::step: this optimizer has been stepped already. Call update() once all "
              "optimizers have been stepped.");
}

/// Whether what unscale_ has divided and checked is what there is. (Gradients that the program
/// makes up by itself, zeros for a parameter that has none, say, are its own business.)
TORCHAMP_BODY void GradScaler::check_complete(const torch::optim::Optimizer& optimizer,
                                              const detail::OptimizerState& state) const {
  const bool taken = state.taken != detail::gradients_taken();
  TORCH_CHECK(
      ((!taken && state.had_gradients) || detail::count_gradients(optimizer) <= state.gradients) &&
          !(taken && detail::any_taken_after(optimizer, state.taken)),
      "GradScaler::step: gradients came after unscale_, which have neither been divided by "
      "the scale nor checked. Let them be complete before: ",
      taken ? "call MasterWeights::take_gradients() before unscale_, and with an "
              "Accumulation in before_unscale."
            : "unscale_ found none at all.");
  TORCH_CHECK(!state.watched || order_.was_asked() || !state.watched->any_added(optimizer),
              "GradScaler::step: backward() of a scaled loss has added to the gradients of this "
              "optimizer after unscale_, or after a clip that names the scaler. Unscale and clip "
              "after the last backward(). To go on, drop the gradients and call discard().");
}

/// Has masters notice a step that LibTorch's own optimizers may hide: SGD writes through data().
TORCHAMP_BODY void GradScaler::note_written(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (!param.defined() || !param.unsafeGetTensorImpl()->grad().defined()) continue;
      if (detail::weight_meta_of(param)) param.unsafeGetTensorImpl()->bump_version();
    }
  }
}

/// What a disabled scaler's step returns.
TORCHAMP_BODY StepResult GradScaler::unscaled_result(at::Tensor value) {
  auto record = std::make_shared<detail::StepRecord>();
  record->found_inf.on_host = false;
  record->scale.on_host = 1.;
  record->skips_before.on_host = 0.;
  record->value = std::move(value);
  return StepResult(std::move(record));
}

TORCHAMP_BODY StepResult GradScaler::step(torch::optim::Optimizer& optimizer) {
  using Stage = detail::OptimizerState::Stage;
  TORCH_CHECK(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
              "GradScaler::step: LBFGS evaluates the loss by itself. Call step(optimizer, closure) "
              "(torchamp/closure_step.h) with a closure that returns the loss.");
  const detail::DropWeightCasts drop_weight_casts(optimizer);
  if (!options_.enabled) {
    at::Tensor value = optimizer.step();
    note_written(optimizer);
    return unscaled_result(std::move(value));
  }
  check_started("step");
  detail::OptimizerState& state = optimizers_.of(optimizer);
  check_not_stepped(state);
  if (state.stage == Stage::unscaled) {
    check_complete(optimizer, state);
  } else {
    check_order(optimizer, "GradScaler::step");
  }
  order_.warn_of_early_clip(optimizer);

  auto* const fused = dynamic_cast<ScaledStep*>(&optimizer);
  at::Tensor grad_scale;
  const bool left_to_step = state.stage == Stage::ready && fused && !options_.recheck;
  const bool divides = division_may_overflow(optimizer);
  const detail::Divisor clip = left_to_step ? detail::ClipLeft::to(optimizer) : detail::Divisor();
  if (left_to_step && !clip_may_overflow(optimizer, clip)) {
    {
      const detail::InternalOps guard;
      grad_scale = clip.times(state_.scale());
    }
    // A step that is tried again looks anew: a failed capture has taken its flag's memory with it.
    if (!state.agreed) state.found_inf = {};
    check_only(optimizer, state, divides, clip.defined() ? &clip : nullptr, grad_scale);
    check_clip(clip, state.found_inf.tensor);
  } else {
    if (state.stage == Stage::ready) unscale(optimizer, state, "GradScaler::step");
    if (options_.recheck && !state.rechecked) {
      if (state.agreed) state.found_inf = {state.found_inf.tensor.clone(), std::nullopt};
      check_only(optimizer, state, false);
      state.agreed = false;
    }
  }
  agree(state);
  // A step that is tried again sees what its gradients have become, unless processes have agreed.
  state.rechecked = options_.recheck && (options_.agree_found_inf || state.shards);

  std::vector<MissingGradient> missing;
  at::Tensor value;
  if (!state.had_gradients) {
    missing = report_missing(optimizer);
  } else if (fused) {
    value = detail::ClipLeft::step_scaled(
        *fused, grad_scale, state.found_inf.tensor,
        {.clip_in_scale = clip.defined() && grad_scale.defined(), .exact_flag = state.exact});
  } else if (!state.found_inf.read()) {
    value = optimizer.step();
    note_written(optimizer);
  }
  return finish_step(state, std::move(value), std::move(missing));
}

/// The optimizer of `state` has stepped or been skipped.
TORCHAMP_BODY StepResult GradScaler::finish_step(detail::OptimizerState& state, at::Tensor value,
                                                 std::vector<MissingGradient> missing,
                                                 int64_t attempts) {
  state.stage = detail::OptimizerState::Stage::stepped;
  auto record = std::make_shared<detail::StepRecord>();
  record->found_inf = state.found_inf;
  record->had_gradients = state.had_gradients;
  if (const auto* host = state_.host()) {
    record->scale.on_host = host->scale;
    record->skips_before.on_host = host->skips;
  } else {
    record->scale.tensor = state_.scale();
    record->skips_before.tensor = state_.skips();
    record->lazy_skips = state_.lazy_skips();
    records_.push_back(record);
  }
  record->value = std::move(value);
  record->missing = std::move(missing);
  record->attempts = attempts;
  return StepResult(std::move(record));
}

TORCHAMP_BODY std::vector<MissingGradient> GradScaler::report_missing(
    const torch::optim::Optimizer& optimizer) {
  std::vector<MissingGradient> missing = missing_gradients(optimizer, state_.scale().device());
  if (warned_of_missing_) return missing;
  warned_of_missing_ = true;
  std::ostringstream list;
  constexpr std::size_t most = 10;
  for (std::size_t i = 0; i < std::min(missing.size(), most); ++i) {
    list << "\n  " << missing[i];
  }
  if (missing.size() > most) list << "\n  and " << missing.size() - most << " more";
  TORCH_WARN(
      "GradScaler::step: no parameter of this optimizer has a gradient, so it was not stepped.",
      list.str());
  return missing;
}

}  // namespace TORCHAMP_NAMESPACE
