// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/detail/core/scaler/check_options.h"
#include "torchamp/detail/core/scaler/misuse.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

TORCHAMP_COLD void ScaledBackward::watch(const std::shared_ptr<ScaledBackward>& backward,
                                         const at::Tensor& scaled) {
  if (!scaled.requires_grad()) {
    backward->has_run_ = true;
    return;
  }
  scaled.register_hook([backward](const at::Tensor&) { begin(backward); });
}

TORCHAMP_COLD void ScaledBackward::begin(const std::shared_ptr<ScaledBackward>& backward) {
  backward->has_run_ = true;
  const int task = torch::autograd::get_current_graph_task_id();
  const std::scoped_lock lock(backward->mutex_);
  if (backward->unscaled_.empty() || std::exchange(backward->task_, task) == task) return;
  std::vector<Found> gradients;
  for (const WeakTensor& one : backward->unscaled_) {
    gradients.push_back({one, SeenTensor(gradient_of(one.lock()))});
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [backward, gradients = std::move(gradients)] { backward->end(gradients); });
}

TORCHAMP_COLD void ScaledBackward::end(const std::vector<Found>& gradients) {
  const std::scoped_lock lock(mutex_);
  for (const Found& found : gradients) {
    const at::Tensor now = gradient_of(found.parameter.lock());
    if (!found.gradient.is_unchanged(now)) added_.emplace_back(now);
  }
}

// ---- What a scaler does with gradients ----------------------------------------------------------

/// Whether dividing by the scale may make an inf of a finite gradient.
[[gnu::cold]] inline bool division_may_overflow(LossScale& scale,
                                                torch::optim::Optimizer& optimizer) {
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
[[gnu::cold]] inline void check_gradients(torch::optim::Optimizer& optimizer, OptimizerState& state,
                                          LossScale& scale, bool as_if_divided,
                                          const Divisor& clip = {},
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

TORCHAMP_COLD void agree(OptimizerState& state, LossScale& scale, const LossWatch* losses) {
  if (state.agreed) return;
  const GradScalerOptions& options = scale.options();
  if (options.agree_found_inf || state.shards) {
    const InternalOps guard;
    at::Tensor found_inf = state.found_inf.tensor.clone();
    options.agree_found_inf ? options.agree_found_inf(found_inf)
                            : state.shards->agree_largest(found_inf);
    TORCHAMP_CHECK(found_inf.defined() && found_inf.numel() == 1,
                   "GradScaler: agree_found_inf has left no tensor of one element.");
    found_inf = found_inf.reshape({}).ne(0).to(scale.scale().options());
    state.found_inf = {std::move(found_inf), std::nullopt};
    state.exact = true;
  }
  if (losses) losses->mark(state.largest, scale.scale());
  if (const ScaleRule* const rule = scale.rule()) {
    rule->agree(options, state.shards.get(), scale.scale(), state.largest);
  }
  state.agreed = true;
}

/// What the optimizers of the iteration have found.
[[gnu::cold]] inline Findings findings_of(StepLedger& ledger, LossScale& scale) {
  Findings found;
  for (auto& entry : ledger.optimizers) {
    OptimizerState& state = entry.state;
    if (state.stage == OptimizerState::Stage::ready) continue;
    agree(state, scale, ledger.losses.get());
    if (!state.had_gradients && !scale.options().agree_found_inf) continue;
    const std::optional<bool> flag = state.found_inf.without_reading();
    found.known &= flag.has_value();
    if (state.largest.defined()) {
      found.known &= state.largest.is_cpu();
      found.largest =
          found.largest.defined() ? at::maximum(found.largest, state.largest) : state.largest;
    }
    found.bad |= flag.value_or(false);
    found.flags.push_back(state.found_inf.tensor);
  }
  return found;
}

// ---- A step -------------------------------------------------------------------------------------

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
[[gnu::cold]] inline bool product_overflows(const LossScale& scale, const Divisor& clip) {
  if (!clip.defined() || !clip.number.is_cpu() || !scale.scale().is_cpu()) return false;
  const float one = *scale.scale().const_data_ptr<float>();
  const float other = *clip.value().const_data_ptr<float>();
  return std::isfinite(one) && std::isfinite(other) && !std::isfinite(one * other);
}

/// Whether the scale times `clip`, which is left to the step of `optimizer`, may be more than fp32
/// holds, and the gradients can be divided before.
[[gnu::cold]] inline bool clip_may_overflow(LossScale& scale, const Divisor& clip,
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
[[gnu::cold]] inline void check_complete(const torch::optim::Optimizer& optimizer,
                                         const OptimizerState& state, const StepOrder& order) {
  const bool taken = state.taken != gradients_taken();
  TORCHAMP_CHECK(
      ((!taken && state.had_gradients) || count_gradients(optimizer) <= state.gradients) &&
          !(taken && any_taken_after(optimizer, state.taken)),
      "GradScaler::step: gradients came after unscale_, so they were neither unscaled nor checked. "
      "Complete them first: ",
      taken ? "call MasterWeights::take_gradients() before unscale_, and with an Accumulation in "
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
[[gnu::cold]] inline LeftToStep check_for_step(torch::optim::Optimizer& optimizer, bool fused,
                                               OptimizerState& state, LossScale& scale) {
  const bool recheck = scale.options().recheck;
  const bool is_ready = state.stage == OptimizerState::Stage::ready;
  const bool divides = division_may_overflow(scale, optimizer);
  LeftToStep left;
  if (is_ready && fused && !recheck) {
    const Divisor clip = ClipLeft::to(optimizer);
    if (!clip_may_overflow(scale, clip, optimizer)) {
      {
        const InternalOps guard;
        left = {clip.times(scale.scale()), clip.defined()};
      }
      // A step that is tried again looks anew: a failed capture has taken its flag's memory with
      // it.
      if (!state.agreed) state.found_inf = {};
      check_gradients(optimizer, state, scale, divides, clip, left.grad_scale);
      if (product_overflows(scale, clip)) state.found_inf.tensor.fill_(1.);
      return left;
    }
  }
  if (is_ready) state = unscale_gradients(optimizer, scale, "GradScaler::step");
  if (recheck && !state.rechecked) {
    if (state.agreed) state.found_inf = {state.found_inf.tensor.clone(), std::nullopt};
    check_gradients(optimizer, state, scale, /*as_if_divided=*/false);
    state.agreed = false;
  }
  return left;
}

}  // namespace detail

// ---- GradScaler ---------------------------------------------------------------------------------

TORCHAMP_COLD GradScaler::GradScaler(GradScalerOptions options)
    : scale_(std::move(options)), ledger_(scale_) {}
TORCHAMP_BODY GradScaler::GradScaler(GradScaler&&) noexcept = default;
TORCHAMP_BODY GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;
TORCHAMP_BODY GradScaler::~GradScaler() = default;

TORCHAMP_BODY at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  return is_enabled() ? scale(at::TensorList(outputs)).front() : outputs;
}

TORCHAMP_COLD std::vector<at::Tensor> GradScaler::scale(at::TensorList outputs) {
  std::vector<at::Tensor> scaled = outputs.vec();
  if (!is_enabled() || outputs.empty()) return scaled;
  for (const at::Tensor& output : outputs) {
    TORCHAMP_CHECK_VALUE(output.defined(),
                         "GradScaler::scale: the tensor is undefined. Pass the loss.");
    ledger_.scaled.check_not_in(output, "GradScaler::scale");
  }
  const bool is_first = !scale_.created();
  if (is_first) scale_.create(outputs.front().device());
  try {
    if (!scale_.stays_at_one()) {
      const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
      at::Tensor here;
      for (at::Tensor& output : scaled) {
        if (!here.defined() || here.device() != output.device()) {
          here = detail::to_device_async(output.device(), scale_.scale());
        }
        output = at::mul(output, here);
        ledger_.note_scaled(output);
      }
    }
    ledger_.order.note_scaled();
    for (const at::Tensor& output : outputs) {
      if (ledger_.losses) ledger_.losses->note(output, scale_.scale().device());
    }
  } catch (...) {
    if (is_first) scale_.drop();
    throw;
  }
  return scaled;
}

TORCHAMP_BODY void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  scale_.check_created("unscale_");
  detail::OptimizerState& state = ledger_.optimizers.of(optimizer);
  TORCHAMP_CHECK(!state.in_closure,
                 "GradScaler::unscale_: the closure of this optimizer's step has called unscale_. "
                 "Let it only compute and return the loss: step unscales.");
  TORCHAMP_CHECK(state.stage != detail::OptimizerState::Stage::unscaled,
                 "GradScaler::unscale_: the gradients of this optimizer have been unscaled "
                 "already. Call unscale_ once for each optimizer between two calls of update(). "
                 "(If an exception came before update(), call discard(optimizer).)");
  TORCHAMP_CHECK(state.stage != detail::OptimizerState::Stage::stepped,
                 "GradScaler::unscale_: this optimizer has been stepped already. Call unscale_ "
                 "before step, and update() after it.");
  if (!scale_.stays_at_one()) ledger_.order.check(optimizer, "GradScaler::unscale_");
  state = detail::unscale_gradients(optimizer, scale_, "GradScaler::unscale_");
  ledger_.order.backward->note_unscaled(optimizer);
}

TORCHAMP_COLD StepResult GradScaler::step(torch::optim::Optimizer& optimizer) {
  TORCHAMP_CHECK(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
                 "GradScaler::step: LBFGS evaluates the loss by itself. Call step(optimizer, "
                 "closure) (torchamp/closure_step.h) with a closure that returns the loss.");
  const detail::DropWeightCasts drop_weight_casts(optimizer);
  if (!is_enabled()) {
    at::Tensor value = optimizer.step();
    detail::note_written(optimizer);
    return detail::ScalerParts::unscaled_result(std::move(value));
  }
  scale_.check_created("step");
  detail::OptimizerState& state = ledger_.optimizers.of(optimizer);
  detail::check_not_stepped(state);
  if (state.stage == detail::OptimizerState::Stage::unscaled) {
    detail::check_complete(optimizer, state, ledger_.order);
  } else {
    if (!scale_.stays_at_one()) ledger_.order.check(optimizer, "GradScaler::step");
  }
  ledger_.order.warn_of_early_clip(optimizer);

  auto* const fused = dynamic_cast<ScaledStep*>(&optimizer);
  const detail::LeftToStep left =
      detail::check_for_step(optimizer, fused != nullptr, state, scale_);
  detail::agree(state, scale_, ledger_.losses.get());
  // A step that is tried again sees what its gradients have become, unless processes have agreed.
  state.rechecked = options().recheck && (options().agree_found_inf || state.shards);

  std::vector<MissingGradient> missing;
  at::Tensor value;
  if (!state.had_gradients) {
    missing = ledger_.report_missing(optimizer, scale_.scale().device());
  } else if (fused) {
    value = detail::ClipLeft::step_scaled(
        *fused, left.grad_scale, state.found_inf.tensor,
        {.clip_in_scale = left.clip_in_scale, .exact_flag = state.exact});
  } else if (!state.found_inf.read()) {
    value = optimizer.step();
    detail::note_written(optimizer);
  }
  return StepResult(ledger_.finish(state, scale_, std::move(value), std::move(missing)));
}

TORCHAMP_BODY void GradScaler::discard(const torch::optim::Optimizer& optimizer) {
  ledger_.optimizers.reset(optimizer);
  ledger_.order.backward->forget(optimizer);
  if (ledger_.losses) ledger_.losses->forget();  // they may have been this one's
}

TORCHAMP_COLD void GradScaler::update() {
  if (!is_enabled()) return;
  scale_.check_created("update");
  TORCHAMP_CHECK(ledger_.optimizers.within_iteration(),
                 "GradScaler::update: no optimizer has been stepped or unscaled since the last "
                 "update. Call step(optimizer) first, or update(new_scale) to set the scale. "
                 "(optimizer.step() does not count: it neither unscales nor checks the gradients. "
                 "An Accumulation and a TrainingStep call step and update themselves.)");
  detail::ScaleLimits::Met met;
  {
    const detail::InternalOps guard;
    const detail::Findings found = detail::findings_of(ledger_, scale_);
    if (!found.flags.empty() && !scale_.knows(found)) ledger_.keep_results();
    met = scale_.update(found);
  }
  ledger_.end_iteration();
  scale_.announce(met);
}

TORCHAMP_BODY void GradScaler::update(double new_scale) {
  if (!is_enabled()) return;
  scale_.check_created("update");
  detail::check_scale("GradScaler::update", new_scale, options());
  const detail::InternalOps guard;
  ledger_.keep_results();
  scale_.set_scale(static_cast<float>(new_scale));
  ledger_.end_iteration();
}

TORCHAMP_BODY void GradScaler::update(const at::Tensor& new_scale) {
  if (!is_enabled()) return;
  scale_.check_created("update");
  TORCHAMP_CHECK_VALUE(
      new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad() &&
          !new_scale.is_complex(),
      "GradScaler::update: the new scale is one real number without requires_grad.");
  TORCHAMP_CHECK_VALUE(new_scale.device().type() == scale_.scale().device().type(),
                       "GradScaler::update: the new scale is on ", new_scale.device(),
                       ", the scale on ", scale_.scale().device(), ". Move it there.");
  if (new_scale.is_cpu()) return update(new_scale.item<double>());
  const detail::InternalOps guard;
  ledger_.keep_results();
  scale_.set_scale(new_scale);
  ledger_.end_iteration();
}

TORCHAMP_BODY double GradScaler::get_scale() const {
  ledger_.order.note_asked(/*for_good=*/false);
  return is_enabled() ? scale_.read_scale() : 1.;
}

TORCHAMP_BODY at::Tensor GradScaler::scale_tensor() const {
  ledger_.order.note_asked(/*for_good=*/true);  // update() changes it in place
  return is_enabled() ? scale_.scale() : at::Tensor();
}

TORCHAMP_BODY int64_t GradScaler::skips_in_a_row() const {
  return is_enabled() ? static_cast<int64_t>(scale_.skips().read()) : 0;
}

TORCHAMP_BODY bool GradScaler::is_unscaled(const torch::optim::Optimizer& optimizer) const {
  const detail::OptimizerState* state = ledger_.optimizers.find(optimizer);
  return state && state->stage == detail::OptimizerState::Stage::unscaled;
}

TORCHAMP_BODY bool GradScaler::is_stepped(const torch::optim::Optimizer& optimizer) const {
  const detail::OptimizerState* state = ledger_.optimizers.find(optimizer);
  return state && state->stage == detail::OptimizerState::Stage::stepped;
}

TORCHAMP_BODY at::Tensor GradScaler::found_inf(const torch::optim::Optimizer& optimizer) {
  detail::OptimizerState* const state = ledger_.optimizers.find(optimizer);
  if (!state || state->stage == detail::OptimizerState::Stage::ready) return {};
  detail::agree(*state, scale_, ledger_.losses.get());
  return state->found_inf.tensor;
}

TORCHAMP_BODY GradScalerState GradScaler::state_dict() const {
  return is_enabled() ? scale_.state_of(scale_.read()) : GradScalerState();
}

TORCHAMP_BODY void GradScaler::load_state_dict(const GradScalerState& state) {
  if (!is_enabled()) return;
  detail::restore_scaler(*this, "GradScaler::load_state_dict", state,
                         detail::initial_memory(options()));
}

}  // namespace TORCHAMP_NAMESPACE
