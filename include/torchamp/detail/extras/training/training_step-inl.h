// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/training_log.h"
#include "torchamp/training_step.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY at::ScalarType default_dtype(at::DeviceType device) {
  return device == at::kCUDA ? at::kHalf : at::autocast::get_autocast_dtype(device);
}

/// An Accumulation's messages in a TrainingStep, which drops the window after an error.
inline constexpr AccumulationTerms training_step_terms{
    .backward = "TrainingStep",
    .flush = "TrainingStep",
    .owner = "the TrainingStep",
    .drop = "This window is dropped; the next call begins a new one.",
    .change = "Set .max_grad_norm to clip.",
    .send = "Pass the process group as .group: the TrainingStep then sends them."};

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY void TrainingStep::check(const TrainingStepOptions& options, bool makes) {
  TORCH_CHECK_VALUE(options.micro_batches >= 1, "TrainingStep: micro_batches is ",
                    options.micro_batches, ". It must be 1 or more.");
  TORCH_CHECK_VALUE(!options.max_grad_norm || *options.max_grad_norm >= 0.,
                    "TrainingStep: max_grad_norm is ", options.max_grad_norm.value_or(0.),
                    ". It must be 0 or more, or unset.");
  TORCH_CHECK_VALUE(!options.dtype || *options.dtype == at::kHalf ||
                        *options.dtype == at::kBFloat16 || *options.dtype == at::kFloat,
                    "TrainingStep: dtype is ", options.dtype.value_or(at::kFloat),
                    ". It must be fp16, bf16, fp32 (no casts), or unset.");
  const bool must_capture = options.capture.make && !options.capture.make.when_possible;
  TORCH_CHECK_VALUE(!must_capture || !options.group.make,
                    "TrainingStep: capture and group cannot be together: gradients are averaged on "
                    "streams that a graph cannot hold. Leave one of them out.");
  if (!options.masters.make) return;
  TORCH_CHECK_VALUE(
      makes,
      "TrainingStep: with masters, the optimizer must step the masters. Pass a function "
      "that creates it: [](auto parameters) { return "
      "std::make_unique<torchamp::FusedAdamW>(parameters); }.");
  TORCH_CHECK_VALUE(!options.dtype || *options.dtype == options.masters.make.dtype,
                    "TrainingStep: dtype is ", options.dtype.value_or(at::kFloat),
                    ", but the masters' dtype is ", options.masters.make.dtype,
                    ". Set only the masters' dtype.");
  TORCH_CHECK_VALUE(!options.masters.make.needs_group || options.group.make,
                    "TrainingStep: ShardedMasterWeightsOptions need a process group. Set .group.");
}

/// Throws for optimizers that no scaler can step.
TORCHAMP_BODY void TrainingStep::check_optimizer() const {
  for (const auto& optimizer : optimizers_) {
    TORCH_CHECK_VALUE(dynamic_cast<const torch::optim::LBFGS*>(optimizer.get()) == nullptr,
                      "TrainingStep: LBFGS evaluates the loss many times in a step. Call "
                      "step(scaler, optimizer, closure) of torchamp/closure_step.h.");
  }
  if (masters_) return;
  const auto has = [this](at::ScalarType dtype) {
    return detail::any_parameter(*optimizer_, [dtype](const at::Tensor& parameter) {
      return parameter.requires_grad() && detail::step_dtype(parameter) == dtype;
    });
  };
  TORCH_CHECK_VALUE(
      !has(at::kHalf),
      "TrainingStep: the optimizer has fp16 parameters, which small updates would not change. "
      "Leave the model in fp32 (the guard casts), or set .masters.");
  if (has(at::kBFloat16)) {
    TORCH_WARN(
        "TrainingStep: the optimizer has bf16 parameters, which updates of less than about 1/256 "
        "of a weight do not change. Leave the model in fp32 (the guard casts), or set .masters.");
  }
}

TORCHAMP_BODY TrainingStep::TrainingStep(const detail::Model& model, TrainingStepOptions options,
                                         bool makes, const MakeOptimizer& make)
    : model_(model.get()),
      scaler_(options.scaler.scaler),
      max_grad_norm_(options.max_grad_norm),
      micro_batches_(options.micro_batches) {
  TORCH_CHECK_VALUE(model_, "TrainingStep: there is no model.");
  check(options, makes);
  const auto parameters = model_->parameters();
  TORCH_CHECK_VALUE(options.device || !parameters.empty(),
                    "TrainingStep: the model has no parameters. Set .device.");
  device_ = options.device ? *options.device : parameters.front().device();
  const auto is_there = [this](const at::Tensor& t) { return t.device().type() == device_.type(); };
  TORCH_CHECK_VALUE(parameters.empty() || std::ranges::any_of(parameters, is_there),
                    "TrainingStep: device is ", device_, ", and the model's parameters are on ",
                    parameters.empty() ? device_ : parameters.front().device(),
                    ". Move the model there first.");
  const at::ScalarType dtype = options.masters.make ? options.masters.make.dtype
                               : options.dtype      ? *options.dtype
                                                    : detail::default_dtype(device_.type());
  autocast_ = {.dtype = dtype,
               .enabled = dtype != at::kFloat,
               .policy = std::move(options.policy),
               .cache = options.cache};
  if (!autocast_.enabled) autocast_.dtype.reset();
  const auto is_fp64 = [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kDouble; };
  if (autocast_.enabled && !parameters.empty() && std::ranges::all_of(parameters, is_fp64)) {
    TORCH_WARN(
        "TrainingStep: the parameters are fp64, which autocast never casts, so the step computes "
        "in fp64. Make them fp32, or set .dtype = torch::kFloat for no casts.");
  }
  if (!scaler_) {
    scaler_ = &own_scaler_.emplace(options.scaler.options ? std::move(*options.scaler.options)
                                   : dtype == at::kHalf   ? GradScalerOptions()
                                                          : GradScalerOptions::skip_non_finite());
  }
  const detail::ModelBefore before(*model_);
  try {
    make_parts(options, make);
  } catch (...) {
    capture_ = {};
    accumulation_.reset();
    schedulers_.clear();
    optimizer_.reset();
    optimizers_.clear();
    group_.reset();
    if (std::exchange(masters_, nullptr)) before.put_back();
    throw;
  }
}

TORCHAMP_BODY TrainingStep::~TrainingStep() {
  if (pending() == 0) return;
  detail::warn_in_destructor(
      {"TrainingStep: destroyed with ", pending(), " of ", micro_batches_,
       " micro-batches pending: their gradients are lost. Call finish() first."});
  accumulation_->discard();
}

TORCHAMP_BODY void TrainingStep::make_parts(TrainingStepOptions& options,
                                            const MakeOptimizer& make) {
  if (options.group.make) group_ = options.group.make();
  if (options.masters.make) {
    if (group_) group_->broadcast(*model_);
    masters_ = options.masters.make(model_, group_.get());
  }
  optimizers_ = make(masters_ ? masters_->named_parameters() : model_->named_parameters().pairs());
  const bool any_missing = std::ranges::find(optimizers_, nullptr) != optimizers_.end();
  TORCH_CHECK_VALUE(!optimizers_.empty() && !any_missing,
                    "TrainingStep: there is no optimizer: the list is empty, or the factory has "
                    "made no optimizer.");
  optimizer_ = detail::as_one(optimizers_);
  check_optimizer();
  if (options.scheduler.make) schedulers_ = options.scheduler.make(optimizers_);
  if (micro_batches_ > 1) {
    accumulation_.emplace(*scaler_, *optimizer_, micro_batches_);
    accumulation_->set_terms(detail::training_step_terms);
    accumulation_->before_unscale([this] { complete_gradients(); });
  }
  captures_when_possible_ = options.capture.make.when_possible;
  if (options.capture.make && options.group.make) {
    moves_inputs_ = true;
    TORCH_WARN(
        "TrainingStep: iterations run eagerly, with the same results: gradients are averaged on "
        "streams that a graph cannot hold. Leave out .capture or .group.");
  } else if (options.capture.make) {
    capture_ = options.capture.make(optimizers_, model_, [this](const Tensors& inputs) {
      has_run_body_ = true;
      detail::BodyResult made;
      made.of_step =
          std::make_shared<const TrainingResult>(iterate([&] { return (*function_)(inputs); }));
      return made;
    });
  }
  if (!options.log.empty()) log_ = std::make_unique<detail::StepLog>(options.log);
  keeps_scale_ = log_ || bool(capture_);
  if (group_) group_->attach(model_, masters_.get());
}

/// Clears gradients of the last window, and of the program's own backward passes.
TORCHAMP_BODY void TrainingStep::clear_gradients() {
  if (auto* const set = dynamic_cast<detail::OptimizerSet*>(optimizer_.get())) {
    set->update_groups();
  }
  detail::clear_gradients(*optimizer_);
  detail::any_parameter(*optimizer_, [](const at::Tensor& parameter) {
    detail::note_gradient_dropped(parameter);
    return false;
  });
  if (masters_) detail::drop_model_gradients(*optimizer_);
}

/// Completes the gradients of a window, and clips them. The gradients are scaled before it; a clip
/// unscales them, unless the optimizer is fused.
TORCHAMP_BODY void TrainingStep::complete_gradients() {
  if (group_) group_->sync_gradients();
  if (masters_) masters_->take_gradients();
  if (max_grad_norm_) norm_ = clip_grad_norm_(*scaler_, *optimizer_, *max_grad_norm_);
  if (keeps_scale_ && scaler_->is_enabled()) {
    scale_ = detail::ScalerParts::scale(*scaler_).scale().clone();
  }
}

/// `loss` without its graph: the same tensor if it has no other owner.
TORCHAMP_BODY at::Tensor TrainingStep::without_graph(at::Tensor&& loss) {
  if (loss.use_count() > 1 || loss.is_view()) return loss.tensor_data();
  loss.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
  return std::move(loss);
}

/// Throws if the program has called the scaler itself. (An Accumulation has its own check.)
TORCHAMP_BODY void TrainingStep::check_not_used() const {
  const auto is_used = [this](const torch::optim::Optimizer& optimizer) {
    return scaler_->is_unscaled(optimizer) || scaler_->is_stepped(optimizer);
  };
  const bool any_used =
      std::ranges::any_of(optimizers_, [&](const auto& optimizer) { return is_used(*optimizer); });
  TORCH_CHECK(!any_used && !is_used(*optimizer_),
              "TrainingStep: the program has called the scaler's unscale_ or step for this "
              "optimizer in this iteration. Leave unscale_, step and update to the TrainingStep, "
              "and clip by .max_grad_norm. ",
              detail::training_step_terms.drop);
}

/// Reports a backward() in the function. (zero_grad(false) after it increases the version.)
TORCHAMP_BODY void TrainingStep::check_no_backward(const detail::ScaleUse& use) {
  const auto has_new_gradient = [](const at::Tensor& tensor) {
    const at::Tensor& gradient = tensor.unsafeGetTensorImpl()->grad();
    return gradient.defined() && detail::version_of(gradient) == 0;
  };
  const auto was_reached = [&](const at::Tensor& parameter) {
    return has_new_gradient(parameter) ||
           (masters_ && has_new_gradient(detail::narrow_of(parameter)));
  };
  if (!scaler_->is_enabled() || use.was_scaled() || use.was_read() ||
      !detail::any_parameter(*optimizer_, was_reached)) {
    return;
  }
  constexpr const char* text =
      "TrainingStep: the function has called backward() without scale. Return the loss, or the sum "
      "of several; call train.scaler().scale(loss).backward() for what is not returned.";
  TORCH_CHECK(detail::ScalerParts::scale(*scaler_).stays_at_one(), text);
  if (std::exchange(warned_, true)) return;
  TORCH_WARN(text, " This warning is given once.");
}

/// Warns of a model that trains with all its modules in eval().
TORCHAMP_BODY void TrainingStep::warn_of_evaluation_mode() {
  const auto trains = [](const auto& module) { return module->is_training(); };
  if (warned_of_mode_ || std::ranges::any_of(model_->modules(/*include_self=*/false), trains))
    return;
  warned_of_mode_ = true;
  TORCH_WARN(
      "TrainingStep: the model is trained in evaluation mode: batch norms keep their running "
      "statistics and dropout does nothing. Call model->train() after eval(); "
      "TrainingStep::evaluate does so itself. To freeze some layers, put only those in eval(). "
      "This warning is given once.");
}

/// Throws for values that the function must not return.
TORCHAMP_BODY void TrainingStep::check_loss(const at::Tensor& loss) const {
  constexpr const char* text =
      "TrainingStep: the function must return the loss: a scalar computed from the parameters, "
      "with grad mode on. ";
  TORCH_CHECK_VALUE(loss.defined(), text, "It returned an undefined tensor.");
  TORCH_CHECK_VALUE(loss.numel() == 1, text, "It returned a tensor of shape ", loss.sizes(),
                    ": return its mean() or sum().");
  TORCH_CHECK_VALUE(loss.requires_grad(), text, "It returned a tensor that requires no gradient.");
  const detail::StepLedger& ledger = detail::ScalerParts::ledger(*scaler_);
  detail::check_not_scaled(loss, "TrainingStep", ledger);
}

TORCHAMP_BODY TrainingResult TrainingStep::learn(at::Tensor loss) {
  std::optional<StepResult> step;
  try {
    if (!accumulation_) check_not_used();
    if (pending() == 0) check_no_backward(detail::ScalerParts::ledger(*scaler_).use);
    if (accumulation_) {
      step = accumulation_->backward(loss);
    } else {
      scaler_->scale(loss).backward();
      complete_gradients();
      step = scaler_->step(*optimizer_);
      scaler_->update();
    }
    if (step && masters_) masters_->copy_to_model();
  } catch (...) {
    drop_window();
    throw;
  }
  return {without_graph(std::move(loss)), std::move(step), std::move(norm_), std::move(scale_)};
}

TORCHAMP_BODY TrainingResult TrainingStep::replay(
    const Tensors& inputs, const std::function<at::Tensor(const Tensors&)>& function,
    const std::type_info& type) {
  function_ = &function;
  std::vector<double> rules{scaler_->get_growth_factor(), scaler_->get_backoff_factor(),
                            static_cast<double>(scaler_->get_growth_interval())};
  if (rules != captured_rules_ && !captured_rules_.empty()) capture_.capture_again();
  captured_rules_ = std::move(rules);
  detail::CapturedCall call{.function = &type,
                            .in_window = micro_batches_ > 1,
                            .micro_batch = pending(),
                            .steps = pending() + 1 == micro_batches_};
  if (accumulation_) call.undo = accumulation_->bookmark();
  has_run_body_ = false;
  const detail::BodyResult& made = capture_.run(inputs, call);
  if (accumulation_ && !has_run_body_) accumulation_->note_replayed_backward();
  return static_cast<const TrainingResult*>(made.of_step.get())->with_own_answers();
}

TORCHAMP_BODY void TrainingStep::check_inputs_may_be_left_out() {
  constexpr const char* text =
      "TrainingStep: with .capture, pass the function's inputs, because a replay runs no host "
      "code: train({batch.data, batch.target}, [&](const auto& inputs) {…}).";
  TORCH_CHECK(captures_when_possible_, text);
  if (std::exchange(warned_of_inputs_, true)) return;
  TORCH_WARN(text, " Until then, iterations run eagerly. This warning is given once.");
}

/// The host's work after a step, even if it was replayed.
TORCHAMP_BODY TrainingResult TrainingStep::count(TrainingResult result) {
  if (!result.ended_window()) return result;
  ++steps_;
  if (!schedulers_.empty() && result.stepped()) {
    for (const detail::StepScheduler& scheduler : schedulers_) scheduler.step();
  }
  if (log_) log_->add(steps_, result);
  return result;
}

/// Drops the window after a failure.
TORCHAMP_BODY void TrainingStep::drop_window() {
  norm_ = scale_ = at::Tensor();
  if (accumulation_) {
    accumulation_->discard();
  } else {
    detail::clear_gradients(*optimizer_);
    detail::drop_model_gradients(*optimizer_);
    scaler_->discard(*optimizer_);
  }
  if (!masters_ || masters_->syncs()) return;
  try {
    masters_->copy_to_model();   // the optimizer may have stepped before something failed
  } catch (const c10::Error&) {  // the first error is already being thrown
  }
}

TORCHAMP_BODY std::optional<TrainingResult> TrainingStep::finish() {
  const detail::OneCaller::Call call(caller_, "TrainingStep::finish",
                                     detail::OneCaller::Nested::refused);
  std::optional<TrainingResult> result;
  if (pending() > 0) {
    std::optional<StepResult> step;
    const auto flush = [&] {
      step = accumulation_->flush();
      if (masters_) masters_->copy_to_model();
    };
    try {
      capture_ ? capture_.run_eagerly(flush) : flush();
    } catch (...) {
      drop_window();
      throw;
    }
    result = count({at::Tensor(), std::move(step), std::move(norm_), std::move(scale_)});
  }
  if (log_) log_->flush();
  return result;
}

}  // namespace TORCHAMP_NAMESPACE
