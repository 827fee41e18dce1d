// SPDX-License-Identifier: BSD-3-Clause
// The members of GradScaler: scale, unscale_, step, update.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/core/scaler/check_options.h"
#include "torchamp/detail/core/scaler/scaled_loss-inl.h"
#include "torchamp/detail/core/scaler/step-inl.h"
#include "torchamp/detail/core/scaler/step.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// The numbers of all optimizers of the iteration; undefined without gradients. All processes that
/// must agree come here together, and agree on what they have not agreed on yet.
inline Measured measured_of(StepLedger& ledger, LossScale& scale) {
  Measured measured;
  for (auto& entry : ledger.optimizers) {
    OptimizerState& state = entry.state;
    if (state.stage == OptimizerState::Stage::ready) continue;
    agree(state, scale);
    // Processes that have agreed make the same update, even a process without gradients.
    if (!state.had_gradients && !has_others(state, scale.options())) continue;
    merge(measured, state.measured);
  }
  return measured;
}

TORCHAMP_BODY void restore_scaler(GradScaler& scaler, const char* call,
                                  const GradScalerState& state, ScaleMemory<double> rest) {
  check_state(call, state, scaler.options());
  const InternalOps guard;
  ScalerParts::ledger(scaler).keep_results();
  ScalerParts::scale(scaler).restore(state, rest);
}

}  // namespace detail

TORCHAMP_BODY GradScaler::GradScaler(GradScalerOptions options)
    : scale_(std::move(options)), ledger_(scale_) {}
TORCHAMP_BODY GradScaler::GradScaler(GradScaler&&) noexcept = default;
TORCHAMP_BODY GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;
TORCHAMP_BODY GradScaler::~GradScaler() = default;

TORCHAMP_BODY at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  return is_enabled() ? scale(at::TensorList(outputs)).front() : outputs;
}

TORCHAMP_BODY std::vector<at::Tensor> GradScaler::scale(at::TensorList outputs) {
  std::vector<at::Tensor> scaled = outputs.vec();
  if (!is_enabled() || outputs.empty()) return scaled;
  for (const at::Tensor& output : outputs) {
    TORCHAMP_CHECK_VALUE(output.defined(),
                         "GradScaler::scale: the tensor is undefined. Pass the loss.");
    TORCHAMP_CHECK_VALUE(
        !detail::ScaledLoss::is_made_by(output.grad_fn().get(), *ledger_.backward),
        "GradScaler::scale: this tensor has been scaled already, and its gradients would be too "
        "large by the scale. Pass the loss as it was before scale().");
  }
  const bool is_first = !scale_.created();
  if (is_first) scale_.create(outputs.front().device());
  try {
    if (!scale_.stays_at_one()) {
      // A guard's policy that casts mul would cast the scale, and 65536 is inf in fp16.
      const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
      at::Tensor here;  // the scale, copied where an output has another device than the last one
      for (at::Tensor& output : scaled) {
        if (!here.defined() || here.device() != output.device()) {
          here = detail::to_device_async(output.device(), scale_.scale());
        }
        output = at::mul(output, here);
        ledger_.note_scaled(output);
      }
    } else {
      ledger_.note_not_scaled();
    }
    ledger_.use.note_scaled();
  } catch (...) {
    if (is_first) scale_.drop();
    throw;
  }
  return scaled;
}

TORCHAMP_BODY void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  scale_.check_created("unscale_");
  detail::check_allowed(ledger_.optimizers.of(optimizer), detail::Call::unscale,
                        "GradScaler::unscale_");
  if (!scale_.stays_at_one()) ledger_.check_divides(optimizer, "GradScaler::unscale_");
  // A warning may have run the program's code, which may call update().
  detail::OptimizerState& state = ledger_.optimizers.of(optimizer);
  state = detail::unscale_gradients(optimizer, scale_, "GradScaler::unscale_");
  ledger_.note_unscaled(optimizer, state);
}

TORCHAMP_BODY StepResult GradScaler::step(torch::optim::Optimizer& optimizer) {
  TORCHAMP_CHECK(
      dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
      "GradScaler::step: LBFGS evaluates the loss by itself. Call step(scaler, "
      "optimizer, closure) (torchamp/closure_step.h) with a closure that returns the loss.");
  const detail::DropWeightCasts drop_weight_casts(optimizer);
  if (!is_enabled()) {
    at::Tensor value = optimizer.step();
    detail::note_written(optimizer);
    return detail::ScalerParts::unscaled_result(std::move(value));
  }
  scale_.check_created("step");
  {
    const detail::OptimizerState& before = ledger_.optimizers.of(optimizer);
    detail::check_allowed(before, detail::Call::step, "GradScaler::step");
    if (before.stage == detail::OptimizerState::Stage::unscaled) {
      detail::check_complete(optimizer, before, ledger_);
    } else if (!scale_.stays_at_one()) {
      ledger_.check_divides(optimizer, "GradScaler::step");
    }
    ledger_.check_steps(optimizer);
  }
  // A warning may have run the program's code, which may call update().
  detail::OptimizerState& state = ledger_.optimizers.of(optimizer);

  auto* const fused = dynamic_cast<ScaledStep*>(&optimizer);
  const detail::StepDivisor divisor =
      detail::prepare_gradients(optimizer, fused != nullptr, state, scale_);
  // All processes come here, with gradients or without: see Note [What processes agree on].
  detail::agree_for_step(state, scale_);

  std::vector<MissingGradient> missing;
  at::Tensor value;
  if (!state.had_gradients) {
    missing = missing_gradients(optimizer, scale_.scale().device());
  } else if (fused) {
    value = detail::call_scaled_step(*fused, divisor, state.measured.found_inf.tensor);
  } else if (state.measured.found_inf.read() == 0.) {
    value = optimizer.step();
    detail::note_written(optimizer);
  }
  ledger_.note_stepped(optimizer, state);
  const auto record = ledger_.finish(state, scale_, std::move(value), std::move(missing));
  ledger_.warn_of_missing(
      record->missing);  // the step is complete: the program's handler may throw
  return StepResult(record);
}

TORCHAMP_BODY void GradScaler::discard(const torch::optim::Optimizer& optimizer) {
  ledger_.discard(optimizer);
}

TORCHAMP_BODY void GradScaler::update() {
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
    detail::Measured measured = detail::measured_of(ledger_, scale_);
    if (measured.found_inf.tensor.defined()) {
      if (scale_.knows(measured)) {
        met = scale_.update_on_host(measured);
      } else {
        ledger_.keep_results();  // the device changes the scale in place
        met = scale_.update_on_device(measured);
      }
    }
  }
  const auto mistakes = ledger_.end_iteration();
  // Last: these may run the program's code, which may throw, or call the scaler.
  ledger_.warn_of("GradScaler::update", mistakes);
  scale_.announce(met);
}

TORCHAMP_BODY void GradScaler::update(double new_scale) {
  if (!is_enabled()) return;
  scale_.check_created("update");
  detail::check_scale("GradScaler::update", new_scale, options());
  const detail::InternalOps guard;
  ledger_.keep_results();
  scale_.set_scale(static_cast<float>(new_scale));
  const auto mistakes = ledger_.end_iteration();
  ledger_.note_scale_is_known();
  ledger_.warn_of("GradScaler::update", mistakes);
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
  const auto mistakes = ledger_.end_iteration();
  ledger_.note_scale_is_known();
  ledger_.warn_of("GradScaler::update", mistakes);
}

TORCHAMP_BODY double GradScaler::get_scale() const {
  ledger_.use.note_read(/*for_good=*/false);
  return is_enabled() ? scale_.read_scale() : 1.;
}

TORCHAMP_BODY at::Tensor GradScaler::scale_tensor() const {
  ledger_.use.note_read(/*for_good=*/true);  // update() changes it in place
  return is_enabled() ? scale_.scale() : at::Tensor();
}

TORCHAMP_BODY int64_t GradScaler::skips_in_a_row() const {
  return is_enabled() ? static_cast<int64_t>(scale_.skips_once().read()) : 0;
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
  detail::agree(*state, scale_);
  return state->measured.found_inf.tensor;
}

TORCHAMP_BODY GradScalerState GradScaler::state_dict() const {
  ledger_.note_scale_is_known();
  return is_enabled() ? scale_.state_of(scale_.read()) : GradScalerState();
}

TORCHAMP_BODY void GradScaler::load_state_dict(const GradScalerState& state) {
  if (!is_enabled()) return;
  detail::restore_scaler(*this, "GradScaler::load_state_dict", state,
                         detail::initial_memory(options()));
  ledger_.note_scale_is_known();
}

}  // namespace TORCHAMP_NAMESPACE
