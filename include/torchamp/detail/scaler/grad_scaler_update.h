// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/maximum.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "torchamp/detail/scaler/check_options.h"
#include "torchamp/detail/scaler/scale_limits.h"
#include "torchamp/detail/scaler/scale_update.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// Lets the results that are still in use keep the scale and the count of their step.
TORCHAMP_BODY void GradScaler::before_change() {
  for (const auto& weak : records_) {
    if (const auto record = weak.lock()) record->keep();
  }
  records_.clear();
}

TORCHAMP_BODY void GradScaler::end_iteration() {
  windows_.end_iteration(optimizers_);
  optimizers_.clear();
  order_.end_iteration();
  records_.clear();
  if (losses_) losses_->forget();
}

TORCHAMP_BODY void GradScaler::update() {
  if (!options_.enabled) return;
  check_started("update");
  TORCH_CHECK(
      optimizers_.within_iteration(),
      "GradScaler::update: no optimizer has been stepped or unscaled since the last update. "
      "Call step(optimizer) first, or update(new_scale) to set the scale. (optimizer.step() is no "
      "such step: it neither divides the gradients by the scale nor looks for infs in them.)");
  const detail::ScaleLimits::Met met = apply_update();
  end_iteration();
  limits_.announce(options_, met);
  state_.warn_of_skips();
}

/// Brings the scale to what it is after this iteration.
TORCHAMP_BODY detail::ScaleLimits::Met GradScaler::apply_update() {
  const detail::InternalOps guard;
  std::vector<at::Tensor> flags;
  at::Tensor largest;
  bool known = state_.host() != nullptr;
  bool bad = false;
  for (auto& entry : optimizers_) {
    detail::OptimizerState& state = entry.state;
    if (state.stage == detail::OptimizerState::Stage::ready) continue;
    agree(state);
    if (!state.had_gradients && !options_.agree_found_inf) continue;
    const std::optional<bool> flag = state.found_inf.without_reading();
    known &= flag.has_value();
    if (state.largest.defined()) {
      known &= state.largest.is_cpu();
      largest = largest.defined() ? at::maximum(largest, state.largest) : state.largest;
    }
    bad |= flag.value_or(false);
    flags.push_back(state.found_inf.tensor);
  }
  if (flags.empty()) return {};
  if (known) {
    const detail::ScaleMemory<double> before = *state_.host();
    const detail::ScaleMemory<double> after = detail::after_update(
        options_, before, bad, largest.defined() ? largest.item<double>() : 0.);
    const detail::ScaleLimits::Met met = detail::ScaleLimits::met(options_, before, after);
    detail::ScaleLimits::throw_if_met(options_, met);
    state_.set(after);
    return met;
  }
  const bool watched = detail::ScaleLimits::watched(options_);
  const detail::ScaleLimits::Met met =
      watched ? limits_.met_in_mirror(options_) : detail::ScaleLimits::Met{};
  detail::ScaleLimits::throw_if_met(options_, met);
  before_change();
  at::Tensor found_inf = flags.front();
  for (std::size_t i = 1; i < flags.size(); ++i) found_inf = at::add(found_inf, flags[i]);
  state_.advance(options_, flags.size() > 1 ? found_inf.clamp_max(1.) : found_inf, largest,
                 watched);
  if (watched) limits_.send(state_.scale_and_skips());
  return met;
}

TORCHAMP_BODY void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  check_started("update");
  detail::check_scale("GradScaler::update", new_scale, options_);
  const detail::InternalOps guard;
  before_change();
  state_.set_scale(static_cast<float>(new_scale));
  end_iteration();
}

TORCHAMP_BODY void GradScaler::update(const at::Tensor& new_scale) {
  if (!options_.enabled) return;
  check_started("update");
  TORCH_CHECK_VALUE(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad() &&
                        !new_scale.is_complex(),
                    "GradScaler::update: the new scale is one real number without requires_grad.");
  TORCH_CHECK_VALUE(new_scale.device().type() == state_.scale().device().type(),
                    "GradScaler::update: the new scale is on ", new_scale.device(),
                    ", the scale on ", state_.scale().device(), ". Move it there.");
  if (new_scale.is_cpu()) return update(new_scale.item<double>());
  const detail::InternalOps guard;
  before_change();
  state_.set_scale(new_scale, options_);
  end_iteration();
}

}  // namespace TORCHAMP_NAMESPACE
