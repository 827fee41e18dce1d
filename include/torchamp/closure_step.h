// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. step(scaler, optimizer, closure), for LBFGS and other optimizers that evaluate the
/// loss.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/optim/optimizer.h>

#include <exception>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/optim.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

// Note [A step with a closure]
//
// The optimizer chooses how often it evaluates the loss (LBFGS some twenty times per step), and
// reads the gradients after each evaluation. So each evaluation scales, unscales and checks. The
// first evaluation runs before the optimizer is called: if its gradients are not finite, the
// optimizer's step never begins. If the gradients of a later evaluation (a point of a line search)
// are not finite, an exception abandons the optimizer's step, and the parameters are restored.

namespace detail {

/// Abandons an optimizer's step; caught by ClosureStep.
struct StepAbandoned : std::exception {};

/// Copies of an optimizer's parameters. A fused optimizer needs no copies: its step changes nothing
/// if it throws.
class ParameterCopies {
 public:
  explicit ParameterCopies(const torch::optim::Optimizer& optimizer) {
    if (dynamic_cast<const FusedOptimizer*>(&optimizer)) return;
    any_parameter(optimizer, [this](const at::Tensor& parameter) {
      copies_.emplace_back(parameter, parameter.detach().clone());
      return false;
    });
  }

  void restore() const {
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter; const auto& [written, copy] : copies_) {
      parameter = written;
      parameter.copy_(copy);
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

/// Clears the gradients and returns the loss. Error: `closure` has called backward(), as a closure
/// for the optimizer's own step does; another backward() would add to these gradients.
inline at::Tensor evaluate_loss(torch::optim::Optimizer& optimizer,
                                const torch::optim::Optimizer::LossClosure& closure) {
  optimizer.zero_grad();
  at::Tensor loss = closure();
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1,
                    "step(scaler, optimizer, closure): the closure has returned no loss of one "
                    "element. Let it compute and return the loss; step calls backward().");
  TORCH_CHECK_VALUE(
      count_gradients(optimizer) == 0,
      "step(scaler, optimizer, closure): the closure has called backward(). Let it only compute "
      "and return the loss: step calls zero_grad(), scale() and backward() at each evaluation.");
  TORCH_CHECK_VALUE(
      loss.requires_grad(),
      "step(scaler, optimizer, closure): the loss that the closure has returned, ",
      loss.scalar_type(), " on ", loss.device(),
      ", does not require grad: it does not depend on a parameter that does. Compute it in the "
      "closure from the model's output, without a NoGradGuard, detach() or item().");
  return loss;
}

/// One call of step(scaler, optimizer, closure).
class ClosureStep {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;

  ClosureStep(GradScaler& scaler, torch::optim::Optimizer& optimizer, const LossClosure& closure)
      : scaler_(scaler),
        scale_(ScalerParts::scale(scaler)),
        ledger_(ScalerParts::ledger(scaler)),
        optimizer_(optimizer),
        closure_(closure) {}

  StepResult step() {
    TORCH_CHECK_VALUE(closure_,
                      "step(scaler, optimizer, closure): the closure is empty. Pass one that "
                      "returns the loss.");
    const DropWeightCasts drop_weight_casts(optimizer_);
    return scaler_.is_enabled() ? step_scaled() : step_unscaled();
  }

 private:
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
    const OptimizerState& state = ledger_.optimizers.of(optimizer_);
    check_allowed(state, Call::step, "GradScaler::step");
    TORCH_CHECK(state.stage == OptimizerState::Stage::ready,
                "step(scaler, optimizer, closure): the gradients of this optimizer have been "
                "unscaled. Step computes and unscales them itself: leave unscale_ out.");
    ledger_.optimizers.of(optimizer_).in_closure = true;
    const auto leave_closure = c10::make_scope_exit([this] {
      if (auto* const its = ledger_.optimizers.find(optimizer_)) its->in_closure = false;
    });
    at::Tensor loss = evaluate();
    std::vector<MissingGradient> missing;
    at::Tensor value;
    if (!latest_.had_gradients) {
      missing = missing_gradients(optimizer_, scale_.scale().device());
    } else if (latest_.measured.found_inf.read() == 0.) {
      value = step_from(std::move(loss));
    }
    OptimizerState& stepped = ledger_.optimizers.of(optimizer_);  // the closure may use others
    stepped = std::move(latest_);
    ledger_.note_stepped(optimizer_, stepped);
    const auto record = ledger_.finish(stepped, scale_, std::move(value), std::move(missing));
    ledger_.warn_of_missing(record->missing);
    return ScalerParts::result(record);
  }

  /// Returns the result of the optimizer's step; undefined if the step was abandoned. `first`: the
  /// loss, whose gradients are already computed.
  at::Tensor step_from(at::Tensor first) {
    const ParameterCopies copies(optimizer_);
    try {
      at::Tensor value = optimizer_.step([&] {
        if (first.defined()) return std::exchange(first, {});
        at::Tensor loss = evaluate();
        if (latest_.measured.found_inf.read() != 0.) throw StepAbandoned();
        return loss;
      });
      note_written(optimizer_);
      return value;
    } catch (const StepAbandoned&) {
      copies.restore();
      return {};
    } catch (...) {
      copies.restore();
      throw;
    }
  }

  /// Evaluates the loss, unscales and checks its gradients, and sets latest_.
  at::Tensor evaluate() {
    const DropWeightCasts drop_weight_casts(optimizer_);  // the next evaluation has other weights
    at::Tensor loss;
    {
      const at::AutoGradMode with_grad(true);
      loss = evaluate_loss(optimizer_, closure_);
      scaler_.scale(loss).backward();
    }
    latest_ = unscale_gradients(optimizer_, scale_, "step(scaler, optimizer, closure)");
    agree(latest_, scale_);
    return loss;
  }

  GradScaler& scaler_;
  LossScale& scale_;
  StepLedger& ledger_;
  torch::optim::Optimizer& optimizer_;
  const LossClosure& closure_;
  OptimizerState latest_;  // of the latest evaluation
};

}  // namespace detail

/// Steps an optimizer that evaluates the loss itself, once or many times (LBFGS):
///
///     step(scaler, lbfgs, [&] { return loss(model->forward(input), target); });
///     scaler.update();
///
/// `closure` only computes the loss (a call of backward() in it is an error): for each evaluation
/// this function clears the gradients, scales the loss, runs backward, unscales and checks. If the
/// gradients of an evaluation are not finite, the step is skipped and the parameters are restored.
/// If the closure or the optimizer throws, the parameters are also restored. In both cases an
/// optimizer that has already evaluated the loss several times may have changed its own state.
/// Synchronises once per evaluation. Call it once per optimizer between two calls of update(), like
/// GradScaler::step.
///
/// With a disabled scaler, this function only clears the gradients and runs backward for each
/// evaluation; it neither checks the gradients nor restores the parameters. Errors: an empty
/// closure; a closure that returns no loss of one element, or a loss that does not require grad; a
/// call after unscale_ or step in the same iteration.
inline StepResult step(GradScaler& scaler, torch::optim::Optimizer& optimizer,
                       const torch::optim::Optimizer::LossClosure& closure) {
  return detail::ClosureStep(scaler, optimizer, closure).step();
}

}  // namespace TORCHAMP_NAMESPACE
