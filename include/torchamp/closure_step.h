// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief GradScaler::step with a closure, for LBFGS and other optimizers that evaluate the loss.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/core/optim/plan.h"
#include "torchamp/detail/core/optim/state_tensors.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/masters/split_weight.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/optim.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

// Note [A step with a closure]
//
// The optimizer evaluates the loss as often as it likes (LBFGS some twenty times per step) and
// reads the gradients in between, so each evaluation scales, unscales and checks. One that
// overflows is repeated at a lower scale. The first evaluation precedes the call of the optimizer,
// so a step that must be skipped has not begun. If a later one, at a point of a line search, cannot
// be made finite, an exception abandons the optimizer's step, and its parameters and state are
// restored. With forgives_bad_losses this happens at once if the loss itself is an inf or a NaN.

namespace detail {

/// Abandons an optimizer's step; caught by GradScaler::step.
struct StepAbandoned : std::exception {};

/// A copy of an optimizer's parameters and state, which can be restored in place. Of a fused
/// optimizer, whose step changes nothing if it throws, only the parameters.
class OptimizerSnapshot {
 public:
  explicit OptimizerSnapshot(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    const at::NoGradGuard no_grad;
    any_parameter(optimizer, [this](const at::Tensor& parameter) {
      if (!split_of(parameter)) keep(parameter);  // a fused one's
      return false;
    });
    if (is_fused()) return;
    for (const auto& [key, state] : optimizer.state()) {
      if (!state) continue;
      auto& copy = states_[key] = state->clone();  // which has the same tensors
      if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(copy.get())) {
        keep(lbfgs->prev_flat_grad());  // it replaces its other tensors
      } else {
        for_each_state_tensor(*copy, [this](const at::Tensor& tensor) { keep(tensor); });
      }
    }
  }

  void restore() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < kept_.size(); ++i) kept_[i].copy_(values_[i]);
    if (!is_fused()) optimizer_.state() = std::move(states_);
  }

 private:
  bool is_fused() const { return dynamic_cast<const FusedOptimizer*>(&optimizer_) != nullptr; }
  void keep(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    kept_.push_back(tensor);
    values_.push_back(tensor.detach().clone());
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<at::Tensor> kept_, values_;
  ParamStates states_;
};

/// Clears the gradients and returns the loss. An error if `closure` has called backward(), as a
/// closure for an optimizer's own step does: another backward() would add to its gradients.
inline at::Tensor evaluate_loss(torch::optim::Optimizer& optimizer,
                                const torch::optim::Optimizer::LossClosure& closure) {
  optimizer.zero_grad();
  at::Tensor loss = closure();
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1,
                    "GradScaler::step: the closure has returned no loss of one element. Let it "
                    "compute and return the loss; the scaler calls backward().");
  TORCH_CHECK_VALUE(
      count_gradients(optimizer) == 0,
      "GradScaler::step: the closure has called backward(). Let it only compute and return the "
      "loss: the scaler calls zero_grad(), scale() and backward() at each evaluation.");
  TORCH_CHECK_VALUE(
      loss.requires_grad(), "GradScaler::step: the loss that the closure has returned, ",
      loss.scalar_type(), " on ", loss.device(),
      ", does not require grad: it does not depend on a parameter that does. Compute it in the "
      "closure from the model's output, without a NoGradGuard, detach() or item().");
  return loss;
}

/// One call of GradScaler::step with a closure.
template <>
class ClosureStep<GradScaler> {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;

  ClosureStep(GradScaler& scaler, torch::optim::Optimizer& optimizer, const LossClosure& closure,
              int64_t max_retries)
      : scaler_(scaler),
        scale_(ScalerParts::scale(scaler)),
        ledger_(ScalerParts::ledger(scaler)),
        optimizer_(optimizer),
        closure_(closure),
        max_retries_(max_retries) {}

  StepResult step() {
    TORCH_CHECK_VALUE(closure_,
                      "GradScaler::step: the closure is empty. Pass one that returns the loss.");
    TORCH_CHECK_VALUE(max_retries_ >= 0, "GradScaler::step: max_retries is ", max_retries_,
                      ". It is 0 or more.");
    const DropWeightCasts drop_weight_casts(optimizer_);
    return scaler_.is_enabled() ? step_scaled() : step_unscaled();
  }

 private:
  struct Evaluation {
    OptimizerState state;
    at::Tensor loss;
    int64_t attempts = 0;
  };

  /// For a disabled scaler.
  StepResult step_unscaled() {
    at::Tensor value = optimizer_.step([this] {
      const DropWeightCasts before_the_next_evaluation(optimizer_);
      at::Tensor loss = evaluate_loss(optimizer_, closure_);
      loss.backward();
      return loss;
    });
    note_written(optimizer_);
    return ScalerParts::unscaled_result(std::move(value));
  }

  StepResult step_scaled() {
    using Stage = OptimizerState::Stage;
    const OptimizerState& state = ledger_.optimizers.of(optimizer_);
    check_allowed(state, Call::step, "GradScaler::step");
    TORCH_CHECK(state.stage == Stage::ready,
                "GradScaler::step: the gradients of this optimizer have been unscaled. With a "
                "closure, step computes and unscales them itself: leave unscale_ out.");

    ledger_.optimizers.of(optimizer_).in_closure = true;
    const auto leave_closure = c10::make_scope_exit([this] {
      if (auto* const its = ledger_.optimizers.find(optimizer_)) its->in_closure = false;
    });
    Evaluation first;
    bool finite = false;
    try {
      finite = evaluate(first);
    } catch (...) {
      put_scale_back();
      throw;
    }
    std::vector<MissingGradient> missing;
    at::Tensor value;
    if (!first.state.had_gradients) {
      missing = missing_gradients(optimizer_, scale_.scale().device());
    } else if (finite) {
      value = step_from(first);
    }
    OptimizerState& stepped = ledger_.optimizers.of(optimizer_);  // the closure may use others
    stepped = std::move(first.state);
    const auto record =
        ledger_.finish(stepped, scale_, std::move(value), std::move(missing), first.attempts);
    ledger_.warn_of_missing(record->missing);
    return ScalerParts::result(record);
  }

  /// The result of the optimizer's step; undefined, with everything restored, if it was abandoned.
  at::Tensor step_from(Evaluation& first) {
    OptimizerSnapshot snapshot(optimizer_);
    bool is_first = true;
    try {
      at::Tensor value = optimizer_.step([&] {
        if (std::exchange(is_first, false)) return first.loss;
        Evaluation later;
        const bool good = evaluate(later);
        first.state = later.state;
        first.attempts = std::max(first.attempts, later.attempts);
        if (!good) throw StepAbandoned();
        return later.loss;
      });
      note_written(optimizer_);
      return value;
    } catch (const StepAbandoned&) {
      snapshot.restore();
      return {};
    } catch (...) {
      snapshot.restore();
      put_scale_back();
      throw;
    }
  }

  /// Evaluates the loss and its gradients, unscaled, until they are finite. Returns false, with the
  /// last gradients, if they never were.
  bool evaluate(Evaluation& evaluation) {
    for (evaluation.attempts = 1;; ++evaluation.attempts) {
      const DropWeightCasts drop_weight_casts(optimizer_);  // the next evaluation has other weights
      {
        const at::AutoGradMode with_grad(true);
        evaluation.loss = evaluate_loss(optimizer_, closure_);
        scaler_.scale(evaluation.loss).backward();
      }
      evaluation.state = unscale_gradients(optimizer_, scale_, "GradScaler::step");
      agree(evaluation.state, scale_, ledger_.losses.get());
      if (!evaluation.state.found_inf.read()) return true;
      const GradScalerOptions& options = scaler_.options();
      const at::Tensor& amax = evaluation.state.amax;  // inf for a bad loss: after_update()
      if (options.forgives_bad_losses && amax.defined() && std::isinf(amax.item<double>())) {
        return false;  // no scale would help
      }
      if (evaluation.attempts > max_retries_ || !options.dynamic) return false;
      if (scale_.read_scale() <= options.min_scale) return false;
      back_off(options);
    }
  }

  /// Backs off at once, whatever hysteresis says.
  void back_off(const GradScalerOptions& options) {
    const InternalOps guard;
    ScaleMemory<double> values = scale_.read();
    if (!scale_before_) scale_before_ = values;
    values.scale =
        clamp(as_fp32(values.scale * options.backoff_factor), options.min_scale, options.max_scale);
    values.growth_tracker = static_cast<double>(options.growth_tracker_start);
    values.since_change = 0.;
    values.overflows = 0.;
    ledger_.keep_results();
    scale_.set(values);
  }

  void put_scale_back() {
    if (!scale_before_) return;
    const InternalOps guard;
    ledger_.keep_results();
    scale_.set(*scale_before_);
  }

  GradScaler& scaler_;
  LossScale& scale_;
  StepLedger& ledger_;
  torch::optim::Optimizer& optimizer_;
  const LossClosure& closure_;
  int64_t max_retries_;
  std::optional<ScaleMemory<double>> scale_before_;  // if it was lowered
};

}  // namespace detail

}  // namespace TORCHAMP_NAMESPACE
