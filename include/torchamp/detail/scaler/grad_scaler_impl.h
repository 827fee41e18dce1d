// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/isnan.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/gradients/deferred_clip.h"
#include "torchamp/detail/gradients/unscale.h"
#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/scaler/check_options.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

TORCHAMP_BODY void UnscaledGradients::watch(const std::shared_ptr<UnscaledGradients>& gradients,
                                            const at::Tensor& scaled) {
  if (!scaled.requires_grad()) return;
  scaled.register_hook([weak = std::weak_ptr<UnscaledGradients>(gradients)](const at::Tensor&) {
    const auto watched = weak.lock();
    const int task = torch::autograd::get_current_graph_task_id();
    if (!watched || std::exchange(watched->task_, task) == task) return;
    watched->before_ = watched->seen();
    torch::autograd::Engine::get_default_engine().queue_callback([weak] {
      if (const auto then = weak.lock()) then->end();
    });
  });
}

}  // namespace detail

// Note [An iteration]
//
// An iteration runs from one update() to the next. In it, each optimizer is
//
//   ready     scale(), backward(), and as often as the program accumulates
//   unscaled  unscale_(): the gradients are divided by the scale, and whether one of them was inf
//             or NaN is recorded. step() does this first if the program has not.
//   stepped   step(): the optimizer has stepped or been skipped
//
// in this order. unscale_() wants "ready", step() "ready" or "unscaled". update() collects what was
// recorded of all of them and makes them "ready". So one scale serves several optimizers, each of
// which skips by itself, while one bad optimizer lowers the scale for all. One that is gone counts
// for the scale, and is not taken for another; see Note [Which optimizer it is].
//
// What is scaled and what is checked: gradients are checked as they are when they are unscaled, so
// an inf that the program puts in afterwards is stepped with (but see GradScalerOptions::recheck).
// A skipped step leaves the other gradients unscaled. With a ScaledStep optimizer that is "ready",
// the gradients are only checked and the division is left to the optimizer.
//
// Below a scale of 1, dividing may turn a finite gradient into an inf. That is looked for, too; see
// Note [A scale below 1].

TORCHAMP_BODY GradScaler::GradScaler(GradScalerOptions options)
    : options_((options.enabled ? detail::check_options(options) : void(), std::move(options))),
      state_(options_) {
  if (!options_.enabled) return;
  options_.min_scale = detail::as_fp32(options_.min_scale);
  options_.max_scale = detail::as_fp32(options_.max_scale);
  if (const detail::ScaleRule* const rule = state_.rule()) losses_ = rule->watch_losses(options_);
}

TORCHAMP_BODY GradScaler::GradScaler(GradScaler&&) noexcept = default;
TORCHAMP_BODY GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;
TORCHAMP_BODY GradScaler::~GradScaler() = default;

TORCHAMP_BODY void GradScaler::check_started(const char* call) const {
  TORCH_CHECK(state_.created(), "GradScaler::", call,
              ": nothing has been scaled yet. Call scale(loss).backward() first.");
}

TORCHAMP_BODY void GradScaler::check_not_scaled(const at::Tensor& output, const char* call) const {
  scaled_.check_not_in(output, call);
}

/// Warns where gradients that are about to be divided may not have the scale; see Note [Orders that
/// train wrongly].
TORCHAMP_BODY void GradScaler::check_order(const torch::optim::Optimizer& optimizer,
                                           const char* call) {
  if (order_.is_suspect() && !stays_at_one()) order_.warn(optimizer, call);
}

TORCHAMP_BODY void GradScaler::add_scaled(const at::Tensor& scaled) {
  scaled_.add(scaled);
  for (const auto& entry : optimizers_) {
    if (entry.state.stage != detail::OptimizerState::Stage::unscaled) continue;
    if (entry.state.watched) detail::UnscaledGradients::watch(entry.state.watched, scaled);
  }
}

/// Whether scaling is the identity, and not just for the time being.
TORCHAMP_BODY bool GradScaler::stays_at_one() {
  return !options_.dynamic && state_.scale_if_fixed() == 1.;
}

/// Whether dividing by the scale may make an inf of a finite gradient.
TORCHAMP_BODY bool GradScaler::division_may_overflow(torch::optim::Optimizer& optimizer) {
  const auto* const captured = dynamic_cast<CapturedStep*>(&optimizer);
  const bool is_replayed =
      detail::GraphBody::is_running() || (captured && captured->may_be_captured());
  if (is_replayed) state_.expect_replays();
  return state_.may_be_below_one(options_);
}

/// The scale is there when it is made, and goes with it unless it is kept.
class GradScaler::FirstScale {
 public:
  FirstScale(detail::ScaleState& state, at::Device device)
      : state_(state), creates_(!state.created()) {
    if (creates_) state_.create(device);
  }
  ~FirstScale() {
    if (creates_) state_.drop();
  }
  FirstScale(const FirstScale&) = delete;
  FirstScale& operator=(const FirstScale&) = delete;
  void keep() { creates_ = false; }

 private:
  detail::ScaleState& state_;
  bool creates_;
};

TORCHAMP_BODY at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!options_.enabled) return outputs;
  TORCH_CHECK_VALUE(outputs.defined(),
                    "GradScaler::scale: the tensor is undefined. Pass the loss.");
  check_not_scaled(outputs, "GradScaler::scale");
  FirstScale first(state_, outputs.device());
  at::Tensor scaled = outputs;
  if (!stays_at_one()) {
    const detail::UncastOps uncast;
    scaled = at::mul(outputs, state_.scale_on(outputs.device()));
    add_scaled(scaled);
  }
  order_.note_scaled();
  if (losses_) losses_->note(outputs, state_.scale().device());
  first.keep();
  return scaled;
}

TORCHAMP_BODY std::vector<at::Tensor> GradScaler::scale(at::TensorList outputs) {
  if (!options_.enabled) return outputs.vec();
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_VALUE(output.defined(),
                      "GradScaler::scale: the tensor is undefined. Pass the loss.");
    check_not_scaled(output, "GradScaler::scale");
  }
  if (outputs.empty()) return {};
  FirstScale first(state_, outputs.front().device());
  const bool is_one = stays_at_one();
  const detail::UncastOps uncast;
  std::vector<at::Tensor> scales;  // one for each device
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    if (is_one) {
      scaled.push_back(output);
      continue;
    }
    std::size_t d = 0;
    while (d < scales.size() && scales[d].device() != output.device()) ++d;
    if (d == scales.size()) scales.push_back(state_.scale_on(output.device()));
    scaled.push_back(at::mul(output, scales[d]));
    add_scaled(scaled.back());
  }
  order_.note_scaled();
  for (const at::Tensor& output : outputs) {
    if (losses_) losses_->note(output, state_.scale().device());
  }
  first.keep();
  return scaled;
}

TORCHAMP_BODY void GradScaler::unscale(torch::optim::Optimizer& optimizer,
                                       detail::OptimizerState& state, const char* call) {
  const detail::InternalOps guard;
  std::shared_ptr<detail::Shards> shards = detail::shards_of(optimizer, call);
  const auto batches = detail::gradients_of(
      optimizer, stays_at_one() ? detail::HalfGradients::allowed : detail::HalfGradients::refused,
      call);
  const detail::Divisor left = detail::ClipLeft::to(optimizer);
  // Computed here: the step that follows is not to run out of memory once this one is recorded.
  const detail::Divisor divisor{left.value(), 0., left.is_number};
  at::Tensor found_inf = at::zeros({}, state_.scale().options());
  at::Tensor largest;
  const detail::ScaleRule* const rule = state_.rule();
  if (rule) largest = rule->check_and_measure(batches, state_.scale(), found_inf);
  detail::multiply_and_check(
      batches, [this](at::Device device) { return state_.inverse(device); }, found_inf);
  if (divisor.defined()) {  // a clip of the same gradients, still to be made
    detail::ClipLeft::keep(optimizer, divisor);
  }
  const bool may_overflow = division_may_overflow(optimizer);
  if (may_overflow && !rule) detail::check(batches, found_inf);
  state = {.stage = detail::OptimizerState::Stage::unscaled,
           .found_inf = {std::move(found_inf), std::nullopt},
           .largest = std::move(largest),
           .had_gradients = !batches.empty(),
           .exact = true,
           .gradients = detail::count_gradients(optimizer),
           .taken = detail::gradients_taken(),
           .shards = std::move(shards)};
}

/// `clip`: what is left to the step, if anything is; `grad_scale`: what the step divides by then.
TORCHAMP_BODY void GradScaler::check_only(torch::optim::Optimizer& optimizer,
                                          detail::OptimizerState& state, bool as_if_divided,
                                          const detail::Divisor* clip,
                                          const at::Tensor& grad_scale) {
  const detail::InternalOps guard;
  state.shards = detail::shards_of(optimizer, "GradScaler::step");
  const bool on_host = grad_scale.is_cpu();
  const at::Tensor number = clip && clip->is_number && !on_host ? grad_scale : at::Tensor();
  bool is_shared = false;
  const auto batches = detail::gradients_of(optimizer, detail::HalfGradients::allowed,
                                            "GradScaler::step", &is_shared);
  if (is_shared && grad_scale.defined() && (clip != nullptr || !stays_at_one()) &&
      detail::ClipLeft::can_be_left_to(optimizer)) {  // so its step divides them where they lie
    detail::check_none_is_shared(optimizer);
  }
  at::Tensor& found_inf = state.found_inf.tensor;
  if (!found_inf.defined()) state.exact = true;
  const detail::ScaleRule* const rule = state_.rule();
  if (rule && state.stage == detail::OptimizerState::Stage::ready) {
    if (!found_inf.defined()) found_inf = at::zeros({}, state_.scale().options());
    state.largest = rule->check_and_measure(batches, state_.scale(), found_inf);
    if (number.defined()) {
      detail::look_at({{number.device(), at::kFloat}, {number}}, state_.one(), found_inf);
    }
  } else if (clip && clip->tells_finite && on_host && !found_inf.defined() &&
             std::isfinite(*grad_scale.const_data_ptr<float>())) {
    found_inf = at::zeros({}, state_.scale().options());
  } else {
    detail::check(batches, found_inf, state_.scale().device(),
                  {.zero = state_.zero(),
                   .one = state_.one(),
                   .scale = as_if_divided ? state_.scale() : at::Tensor(),
                   .number = number,
                   .norm = clip && clip->tells_finite ? clip->norm : at::Tensor(),
                   .flag = clip ? clip->zero : at::Tensor()});
  }
  state.had_gradients |= !batches.empty();
}

TORCHAMP_BODY void GradScaler::agree(detail::OptimizerState& state) {
  if (state.agreed) return;
  if (options_.agree_found_inf || state.shards) {
    const detail::InternalOps guard;
    at::Tensor found_inf = state.found_inf.tensor.clone();
    options_.agree_found_inf ? options_.agree_found_inf(found_inf)
                             : state.shards->agree_largest(found_inf);
    TORCH_CHECK(found_inf.defined() && found_inf.numel() == 1,
                "GradScaler: agree_found_inf has left no tensor of one element.");
    found_inf = found_inf.reshape({}).ne(0).to(state_.scale().options());
    state.found_inf = {std::move(found_inf), std::nullopt};
    state.exact = true;
  }
  if (losses_) losses_->mark(state.largest, state_.scale());
  if (const detail::ScaleRule* const rule = state_.rule()) {
    rule->agree(options_, state.shards.get(), state_.scale(), state.largest);
  }
  state.agreed = true;
}

TORCHAMP_BODY void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  check_started("unscale_");
  detail::OptimizerState& state = optimizers_.of(optimizer);
  TORCH_CHECK(!state.in_closure,
              "GradScaler::unscale_: this optimizer is being stepped with a closure, which has "
              "called unscale_. Let the closure compute the loss and return it: step unscales.");
  TORCH_CHECK(
      state.stage != detail::OptimizerState::Stage::unscaled,
      "GradScaler::unscale_: the gradients of this optimizer have been unscaled already. Call "
      "unscale_ once for each optimizer between two calls of update().");
  TORCH_CHECK(state.stage != detail::OptimizerState::Stage::stepped,
              "GradScaler::unscale_: this optimizer has been stepped already. Call unscale_ before "
              "step, and update() after it.");
  check_order(optimizer, "GradScaler::unscale_");
  auto watched = std::make_shared<detail::UnscaledGradients>(optimizer);
  scaled_.for_each([&](const at::Tensor& scaled) {
    detail::UnscaledGradients::watch(watched, scaled);  // for another backward() of it
  });
  unscale(optimizer, state, "GradScaler::unscale_");
  state.watched = std::move(watched);
}

TORCHAMP_BODY void GradScaler::discard(const torch::optim::Optimizer& optimizer) {
  optimizers_.reset(optimizer);
  if (losses_) losses_->forget();  // they may have been this one's
}

/// From here on, saving is refused while the window is not empty.
TORCHAMP_BODY void GradScaler::begin_window(
    const std::shared_ptr<detail::AccumulationWindow>& window) {
  windows_.add(window);
}

/// Makes a "ready" optimizer "unscaled" whose gradients are the program's own, with a flag that
/// says whether to step.
TORCHAMP_BODY void GradScaler::take_unscaled(torch::optim::Optimizer& optimizer,
                                             at::Tensor found_inf, bool had_gradients) {
  if (!options_.enabled) return;
  optimizers_.of(optimizer) = {.stage = detail::OptimizerState::Stage::unscaled,
                               .found_inf = {std::move(found_inf), std::nullopt},
                               .had_gradients = had_gradients,
                               .gradients = detail::count_gradients(optimizer),
                               .taken = detail::gradients_taken(),
                               .shards = detail::shards_of(optimizer, "GradScaler::step")};
}

TORCHAMP_BODY double GradScaler::get_scale() const {
  order_.note_asked(/*for_good=*/false);
  return options_.enabled ? state_.read_scale() : 1.;
}

TORCHAMP_BODY at::Tensor GradScaler::scale_tensor() const {
  order_.note_asked(/*for_good=*/true);  // update() changes it in place
  return options_.enabled ? state_.scale() : at::Tensor();
}

TORCHAMP_BODY int64_t GradScaler::skips_in_a_row() const {
  return options_.enabled ? static_cast<int64_t>(state_.read_skips()) : 0;
}

TORCHAMP_BODY bool GradScaler::is_unscaled(const torch::optim::Optimizer& optimizer) const {
  const detail::OptimizerState* state = optimizers_.find(optimizer);
  return state && state->stage == detail::OptimizerState::Stage::unscaled;
}

TORCHAMP_BODY bool GradScaler::is_stepped(const torch::optim::Optimizer& optimizer) const {
  const detail::OptimizerState* state = optimizers_.find(optimizer);
  return state && state->stage == detail::OptimizerState::Stage::stepped;
}

TORCHAMP_BODY at::Tensor GradScaler::found_inf(const torch::optim::Optimizer& optimizer) {
  detail::OptimizerState* const state = optimizers_.find(optimizer);
  if (!state || state->stage == detail::OptimizerState::Stage::ready) return {};
  agree(*state);
  return state->found_inf.tensor;
}

TORCHAMP_BODY void GradScaler::set_growth_factor(double factor) {
  detail::check_growth_factor("GradScaler::set_growth_factor", factor);
  options_.growth_factor = factor;
}

TORCHAMP_BODY void GradScaler::set_backoff_factor(double factor) {
  detail::check_backoff_factor("GradScaler::set_backoff_factor", factor);
  options_.backoff_factor = factor;
}

TORCHAMP_BODY void GradScaler::set_growth_interval(int64_t interval) {
  detail::check_growth_interval("GradScaler::set_growth_interval", interval);
  options_.growth_interval = interval;
  state_.limit_growth_tracker(interval);
}

}  // namespace TORCHAMP_NAMESPACE
