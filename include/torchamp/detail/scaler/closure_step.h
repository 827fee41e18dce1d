// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/bodies.h"
#include "torchamp/detail/optim/parameters.h"
#include "torchamp/detail/optim/state_tensors.h"
#include "torchamp/detail/overlay/weight_casts.h"
#include "torchamp/detail/scaler/step_record.h"
#include "torchamp/detail/split_weight.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

// Note [A step with a closure]
//
// The optimizer evaluates the loss as often as it likes, LBFGS some twenty times in one step, and
// looks at the gradients in between. So each evaluation scales, unscales and checks by itself. One
// that overflows is made again at a lower scale. The first evaluation is made before the optimizer
// is called, so that a step that must be skipped has not begun. If a later one, at a point that a
// line search tries, cannot be made finite, the step is abandoned: an exception leaves the
// optimizer, and its parameters and state are put back. With forgives_bad_losses that is so at once
// where the loss itself is an inf or a NaN.

namespace detail {

/// Leaves an optimizer's step; caught by GradScaler::step.
struct StepAbandoned : std::exception {};

/// A copy of an optimizer's parameters and state, whose values can be put back where they were. (Of
/// a fused one, whose step changes nothing where it throws, the parameters only.)
class OptimizerSnapshot {
 public:
  explicit OptimizerSnapshot(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    const at::NoGradGuard no_grad;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (parameter.defined() && !split_of(parameter)) keep(parameter);  // a fused one's
      }
    }
    if (is_fused()) return;
    for (const auto& [key, state] : optimizer.state()) {
      if (!state) continue;
      auto& copy = states_[key] = state->clone();  // which has the same tensors
      if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(copy.get())) {
        keep(lbfgs->prev_flat_grad());  // what else it holds it replaces
      } else {
        for_each_state_tensor(*copy, [this](const at::Tensor& tensor) { keep(tensor); });
      }
    }
  }

  void restore() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < kept_.size(); ++i) kept_[i].copy_(values_[i]);
    if (!is_fused()) replace_states(optimizer_, std::move(states_));
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

/// The loss, with the parameters' gradients cleared. An error if `closure` has called backward(),
/// as one that is given to an optimizer's own step does: another backward() would add to its
/// gradients.
inline at::Tensor evaluate_loss(torch::optim::Optimizer& optimizer,
                                const torch::optim::Optimizer::LossClosure& closure) {
  optimizer.zero_grad();
  at::Tensor loss = closure();
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1,
                    "GradScaler::step: the closure has returned no loss of one element. It "
                    "computes the loss and leaves backward() to the scaler.");
  TORCH_CHECK_VALUE(
      count_gradients(optimizer) == 0,
      "GradScaler::step: the closure has called backward(). Let it compute the loss and return "
      "it: zero_grad(), scale() and backward() are done here, at each evaluation.");
  TORCH_CHECK_VALUE(
      loss.requires_grad(), "GradScaler::step: the loss that the closure has returned, ",
      loss.scalar_type(), " on ", loss.device(),
      ", needs no gradient: no parameter that does took part in it. Compute it in the closure from "
      "the model's output, without a NoGradGuard and without detach() or item() on the way.");
  return loss;
}

}  // namespace detail

/// Evaluates the loss and its gradients, unscaled, until they are finite. False, and the gradients
/// as they are, if they never were. `before` gets the state of the scale before it is lowered.
TORCHAMP_BODY bool GradScaler::evaluate(torch::optim::Optimizer& optimizer,
                                        const torch::optim::Optimizer::LossClosure& closure,
                                        Evaluation& evaluation, int64_t max_retries,
                                        ScaleBefore& before) {
  for (evaluation.attempts = 1;; ++evaluation.attempts) {
    const detail::DropWeightCasts drop_weight_casts(
        optimizer);  // the next evaluation has other weights
    {
      const at::AutoGradMode with_grad(true);
      evaluation.loss = detail::evaluate_loss(optimizer, closure);
      scale(evaluation.loss).backward();
    }
    unscale(optimizer, evaluation.state, "GradScaler::step");
    agree(evaluation.state);
    if (!evaluation.state.found_inf.read()) return true;
    const at::Tensor& largest = evaluation.state.largest;  // inf for a bad loss, see after_update()
    if (options_.forgives_bad_losses && largest.defined() && std::isinf(largest.item<double>())) {
      return false;  // which no scale would mend
    }
    if (evaluation.attempts > max_retries || !options_.dynamic) return false;
    if (state_.read_scale() <= options_.min_scale) return false;
    const detail::InternalOps guard;
    if (!before.is_known) before = {true, state_.read()};
    before_change();
    state_.back_off(options_);
  }
}

/// Marks an optimizer as being stepped with a closure while it lives.
class GradScaler::WithinClosure {
 public:
  WithinClosure(detail::OptimizerStates& states, torch::optim::Optimizer& optimizer)
      : states_(states), optimizer_(optimizer) {
    states_.of(optimizer).in_closure = true;
  }
  ~WithinClosure() {
    if (auto* const state = states_.find(optimizer_)) state->in_closure = false;
  }
  WithinClosure(const WithinClosure&) = delete;
  WithinClosure& operator=(const WithinClosure&) = delete;

 private:
  detail::OptimizerStates& states_;
  const torch::optim::Optimizer& optimizer_;
};

TORCHAMP_BODY StepResult GradScaler::step(torch::optim::Optimizer& optimizer,
                                          const torch::optim::Optimizer::LossClosure& closure,
                                          int64_t max_retries) {
  using Stage = detail::OptimizerState::Stage;
  TORCH_CHECK_VALUE(closure,
                    "GradScaler::step: the closure is empty. Pass one that returns the loss.");
  TORCH_CHECK_VALUE(max_retries >= 0, "GradScaler::step: max_retries is ", max_retries,
                    ". It is 0 or more.");
  const detail::DropWeightCasts drop_weight_casts(optimizer);
  if (!options_.enabled) {
    at::Tensor value = optimizer.step([&] {
      const detail::DropWeightCasts before_the_next_evaluation(optimizer);
      at::Tensor loss = detail::evaluate_loss(optimizer, closure);
      loss.backward();
      return loss;
    });
    note_written(optimizer);
    return unscaled_result(std::move(value));
  }
  const detail::OptimizerState& state = optimizers_.of(optimizer);
  check_not_stepped(state);
  TORCH_CHECK(
      state.stage == Stage::ready,
      "GradScaler::step: the gradients of this optimizer have been unscaled. With a closure, "
      "step computes and unscales them by itself: leave unscale_ out.");

  const WithinClosure within_closure(optimizers_, optimizer);
  Evaluation first;
  ScaleBefore before;
  const auto put_scale_back = [&] {
    if (!before.is_known) return;
    const detail::InternalOps guard;
    before_change();
    state_.set(before.memory);
  };
  bool finite = false;
  try {
    finite = evaluate(optimizer, closure, first, max_retries, before);
  } catch (...) {
    put_scale_back();
    throw;
  }
  std::vector<MissingGradient> missing;
  at::Tensor value;
  if (!first.state.had_gradients) {
    missing = report_missing(optimizer);
  } else if (finite) {
    detail::OptimizerSnapshot snapshot(optimizer);
    bool is_first = true;
    try {
      value = optimizer.step([&] {
        if (std::exchange(is_first, false)) return first.loss;
        Evaluation later;
        const bool good = evaluate(optimizer, closure, later, max_retries, before);
        first.state = later.state;
        first.attempts = std::max(first.attempts, later.attempts);
        if (!good) throw detail::StepAbandoned();
        return later.loss;
      });
      note_written(optimizer);
    } catch (const detail::StepAbandoned&) {
      snapshot.restore();
    } catch (...) {
      snapshot.restore();
      put_scale_back();
      throw;
    }
  }
  detail::OptimizerState& stepped = optimizers_.of(optimizer);  // the closure may have used others
  stepped = std::move(first.state);
  stepped.stage = Stage::stepped;
  const std::shared_ptr<detail::StepRecord> record = this->record(stepped);
  record->value = std::move(value);
  record->missing = std::move(missing);
  record->attempts = first.attempts;
  return StepResult(record);
}

}  // namespace TORCHAMP_NAMESPACE
