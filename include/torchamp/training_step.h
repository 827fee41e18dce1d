// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. TrainingStep: a training iteration in mixed precision, in one call.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchamp/accumulate.h"
#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/detail/extras/accumulation/accumulation.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/model.h"
#include "torchamp/detail/extras/shared/optimizer_set.h"
#include "torchamp/detail/extras/training/one_caller.h"
#include "torchamp/detail/extras/training/parts.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/training_result.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {
class StepLog;  // of training_log.h
}

namespace TORCHAMP_NAMESPACE {

class MasterWeights;

/// Options of a TrainingStep. An aggregate, for designated initialisers: `TrainingStep train(model,
/// optimizer, {.max_grad_norm = 1., .micro_batches = 4});`
struct TrainingStepOptions {
  /// The device of the iteration. Unset: the device of the model's parameters.
  std::optional<c10::Device> device = std::nullopt;
  /// fp16, bf16, or fp32 (no casts). Unset: the masters' dtype if there are masters; otherwise fp16
  /// on CUDA, and elsewhere the device's autocast dtype, which is bf16 on a CPU (see cpu_products.h
  /// for CPUs without instructions for bf16). A model in fp64 is never cast and causes a warning.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Like AutocastOptions::policy.
  std::optional<Policy> policy = std::nullopt;
  /// GradScalerOptions, or a GradScaler that several TrainingSteps share and that outlives them.
  /// Unset: GradScalerOptions() for fp16, skip_non_finite() for bf16 and fp32. With micro_batches,
  /// use one scaler per TrainingStep: if a step changes a shared scale while another TrainingStep
  /// has an open window, the next call of that TrainingStep throws and drops its window.
  detail::ScalerChoice scaler = {};
  /// If set, gradients are clipped to this norm (clip_grad_norm_).
  std::optional<double> max_grad_norm = std::nullopt;
  /// Number of calls per step. The step uses the gradient of the mean of their losses.
  std::int64_t micro_batches = 1;
  /// Like AutocastOptions::cache. WeightCache::window casts each weight once for all micro-batches.
  std::optional<WeightCache> cache = std::nullopt;
  /// MasterWeightsOptions or, with a group, ShardedMasterWeightsOptions: the model is kept in 16
  /// bits, with masters of its weights for the optimizer. Then a factory must create the optimizer.
  detail::Choice<detail::MastersOption> masters = {};
  /// A process group (torchamp/distributed/training_group.h), or `{group, options}` with
  /// DistributedDataParallelOptions. Gradients are averaged over the group as by
  /// DistributedDataParallel; the function that computes the loss may call the forward of any
  /// module.
  detail::Choice<detail::GroupOption> group = {};
  /// CudaGraphOptions: captures iterations and replays them. It captures again after train() or
  /// eval() of the model or of a part of the model. Each micro-batch of a window has its own graph.
  /// With a group, `capture` is an error. With a group and `when_possible`, the constructor warns,
  /// and the iterations run eagerly.
  detail::Choice<detail::CaptureOption> capture = {};
  /// A learning rate scheduler, several in braces, or a function that creates a scheduler and is
  /// called for each optimizer. It is stepped after each step that was not skipped. To check this,
  /// each step synchronises, even with a fused optimizer.
  detail::Choice<detail::SchedulerOption> scheduler = {};
  /// The path of a file for step, loss, scale, skips, norm and time of each step: see
  /// training_log.h. Empty: no file. Lines are written some steps late, so the log never waits for
  /// a device.
  std::string log = {};
};

/// A training iteration in mixed precision: calls the function that computes the loss under a
/// guard, runs backward with a scaler, clips, steps and updates the scale. You write the loop.
///
///     torchamp::TrainingStep train(model, optimizer, {.max_grad_norm = 1.});
///     for (auto& batch : *loader)
///       train([&] { return torch::mse_loss(model->forward(batch.data), batch.target); });
///     train.finish();   // an incomplete window at the end; for micro-batches
///
/// Results are bitwise identical to a loop written with AutocastGuard, GradScaler, Accumulation
/// (with several micro-batches), clip_grad_norm_, MasterWeights, DistributedDataParallel and
/// CudaGraph, which it uses. A window (`micro_batches` iterations) begins by clearing the
/// optimizer's gradients and ends with one step() and update() of the scaler. Several TrainingSteps
/// may coexist, for example for a GAN.
///
/// If the function throws, its micro-batch is not part of the window. If backward, the clip or the
/// step throws (also at a limit of the scaler), the whole window is dropped. It is also dropped if
/// the function throws after it has called backward() itself, because these gradients cannot be
/// separated from the others. In all cases the next call works.
///
/// If an optimizer is not a ScaledStep, or if there is a scheduler, the host waits for the device
/// once per step. Otherwise an iteration on one process does not synchronise; only captures do.
///
/// Model, optimizer, scaler and scheduler that are passed by reference must outlive it. One thread
/// at a time: if a thread calls it during another thread's call, it throws and changes nothing. If
/// all modules of the model are in eval() during training, it warns once.
///
/// Errors at construction, which name the option: options that are out of range or exclude each
/// other; LBFGS, which needs a closure (torchamp/closure_step.h); fp16 parameters without masters
/// (bf16 parameters cause a warning). After an error, or if the factory throws, the model is
/// unchanged. (With a group and masters, it has the weights of the first process.)
class TrainingStep {
 public:
  /// A factory may accept this type instead of a vector of parameters.
  using NamedParameters = detail::NamedTensors;
  /// Inputs of an iteration that can be captured.
  using Tensors = detail::Tensors;
  /// Several optimizers.
  using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

  /// `model`: a module, a pointer to one, a holder, or a torch::jit::Module.
  TrainingStep(const detail::Model& model, torch::optim::Optimizer& optimizer,
               TrainingStepOptions options = {})
      : TrainingStep(model, Optimizers{optimizer}, std::move(options)) {}

  /// Several optimizers: `TrainingStep train(model, {muon, adamw})`. Either all of them step, or
  /// none: if a gradient of one optimizer is not finite, all skip the step. (torch.amp decides for
  /// each optimizer separately; for that, use a GradScaler.) `max_grad_norm` limits the norm of all
  /// gradients together. If one of the optimizers is not a ScaledStep, each step synchronises. If
  /// an optimizer's step throws, the optimizers before it have already stepped. Errors: no
  /// optimizer; a parameter in two optimizers.
  TrainingStep(const detail::Model& model, Optimizers optimizers, TrainingStepOptions options = {})
      : TrainingStep(model, std::move(options), /*makes=*/false, [&](const NamedParameters&) {
          const std::shared_ptr<void> unowned;
          detail::OptimizerPointers pointers;
          for (torch::optim::Optimizer& one : optimizers) pointers.emplace_back(unowned, &one);
          return pointers;
        }) {}

  /// `factory` creates the optimizer for the parameters of the masters (without masters: of the
  /// model) and returns a pointer to it: `[](auto parameters) { return
  /// std::make_unique<FusedAdamW>(parameters, …); }`. For several optimizers it returns a
  /// std::vector of pointers. The factory's parameter is a std::vector of tensors or
  /// NamedParameters.
  template <class Factory>
  requires(!std::derived_from<std::remove_cvref_t<Factory>, torch::optim::Optimizer>)
      TrainingStep(const detail::Model& model, Factory factory, TrainingStepOptions options = {})
      : TrainingStep(
            model, std::move(options), /*makes=*/true,
            [&](const NamedParameters& named) -> detail::OptimizerPointers {
              if constexpr (detail::MakesOptimizerOf<Factory, Tensors>) {
                Tensors parameters;
                for (const auto& item : named) parameters.push_back(item.second);
                return detail::pointers_of(factory(std::move(parameters)));
              } else if constexpr (detail::MakesOptimizerOfNames<Factory>) {
                return detail::pointers_of(factory(named));
              } else {
                static_assert(
                    detail::is_never<Factory>,
                    "TrainingStep: the second argument is the optimizer (*optimizer, of a "
                    "pointer to one), or a function that creates one and returns a pointer "
                    "to it: [](auto parameters) { return "
                    "std::make_unique<torchamp::FusedAdamW>(parameters); }");
                return {};
              }
            }) {}

  /// Does not compile: the first argument is no model.
  template <class Model, class Optimizer>
  requires(!std::convertible_to<Model, detail::Model>)
      TrainingStep(Model&&, Optimizer&&, const TrainingStepOptions& = {}) {
    static_assert(
        detail::is_never<Model>,
        "TrainingStep: the first argument is the model (a torch::nn module, a std::shared_ptr to "
        "one, its holder, or a torch::jit::Module), the second the optimizer: TrainingStep "
        "train(model, optimizer)");
  }

  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;
  /// Warns if a window is open: call finish() first.
  ~TrainingStep();

  /// Runs an iteration. `loss` computes the loss, a scalar, from the parameters; it is called once,
  /// under the guard. Errors: a loss that is already scaled; an unscaled backward() in the function
  /// (if the scale is fixed at 1: one warning); `.capture`, because nothing can be captured without
  /// the inputs (with `when_possible`: one warning).
  template <std::invocable Loss>
  TrainingResult operator()(Loss&& loss) {
    detail::check_loss_of<Loss&>();
    if constexpr (detail::returns_loss<Loss&>) {
      const detail::OneCaller::Call call(caller_, "TrainingStep",
                                         detail::OneCaller::Nested::refused);
      if (!capture_) return count(iterate(loss));
      check_inputs_may_be_left_out();
      std::optional<TrainingResult> result;
      capture_.run_eagerly([&] { result = iterate(loss); });
      return count(std::move(*result));
    }
  }

  /// Runs an iteration that can be captured: `loss` computes the loss from `inputs` and reads no
  /// other value that changes. Pass a number that changes as an input, in a tensor. A replay does
  /// not call the function. Functions of different types have different graphs. See CudaGraph.
  template <std::invocable<const Tensors&> Loss>
  TrainingResult operator()(const Tensors& inputs, Loss&& loss) {
    detail::check_loss_of<Loss&, const Tensors&>();
    if constexpr (detail::returns_loss<Loss&, const Tensors&>) {
      const detail::OneCaller::Call call(caller_, "TrainingStep",
                                         detail::OneCaller::Nested::refused);
      const auto of_inputs = [&](const Tensors& given) -> at::Tensor { return loss(given); };
      if (capture_) return count(replay(inputs, of_inputs, detail::type_of_function(loss)));
      return count(iterate(
          [&] { return of_inputs(moves_inputs_ ? detail::inputs_on(device_, inputs) : inputs); }));
    }
  }

  /// Does not compile: the function does not take the inputs.
  template <class Loss>
  requires(!std::invocable<Loss, const Tensors&>) void operator()(const Tensors&, Loss&&) {
    detail::refuse_arguments<Loss>();
  }
  /// Does not compile: the argument is not a function. For example, it is the loss itself.
  template <class... Given>
  requires(!detail::is_loss_call<Given...>) void operator()(Given&&...) {
    detail::refuse_arguments<Given...>();
  }

  /// Steps with an incomplete window, at the end of an epoch; the sum of its losses is still
  /// divided by micro_batches. If no window is open, no step is taken. With a group all processes
  /// call it. At the end it writes the rest of the log, which synchronises.
  std::optional<TrainingResult> finish();

  /// Calls `function()` under the guard, without gradients and with all modules in evaluation mode,
  /// and returns its result. Then restores the modes of the modules, even after an exception.
  template <std::invocable Function>
  decltype(auto) evaluate(Function&& function) {
    const detail::OneCaller::Call call(caller_, "TrainingStep::evaluate");
    std::vector<std::pair<torch::nn::Module*, bool>> modes{{model_.get(), model_->is_training()}};
    for (const auto& module : model_->modules(/*include_self=*/false)) {
      modes.emplace_back(module.get(), module->is_training());
    }
    const auto put_back = c10::make_scope_exit([&modes] {
      for (const auto& [module, trains] : modes) {  // a module precedes its submodules
        if (module->is_training() != trains) module->train(trains);
      }
    });
    model_->eval();
    const at::NoGradGuard no_grad;
    const AutocastGuard autocast(device_.type(), autocast_);
    return std::forward<Function>(function)();
  }

  /// Writes a TrainingCheckpoint (torchamp/training_checkpoint.h) of model or masters, optimizer,
  /// scaler, scheduler, the number of steps and random states. With a group all processes call it,
  /// for one file. Error: a call in a window.
  template <class Checkpoint = TrainingCheckpoint>
  void save(const std::string& path) {
    const detail::OneCaller::Call call(caller_, "TrainingStep::save");
    auto checkpoint = checkpoint_of<Checkpoint>("save", path);
    group_ ? group_->save(checkpoint) : checkpoint.save();
  }
  /// Resumes from such a file. Returns false if there is no file: check the path. See
  /// TrainingCheckpoint::load. Errors: a call in a window; a scheduler in the file but not
  /// here, or here but not in the file.
  template <class Checkpoint = TrainingCheckpoint>
  [[nodiscard]] bool load(const std::string& path) {
    const detail::OneCaller::Call call(caller_, "TrainingStep::load");
    auto checkpoint = checkpoint_of<Checkpoint>("load", path);
    return group_ ? group_->load(checkpoint) : checkpoint.load();
  }
  /// Adds the same objects to your own checkpoint, as "model", "optimizer", "scaler", "scheduler"
  /// and "steps"; further optimizers and schedulers are "optimizer2", "scheduler2", …
  /// `checkpoint.add("train", train)` adds them as "train.model" and so on. In a window the
  /// checkpoint's save() and load() are errors.
  template <class Checkpoint>
  void add_to(Checkpoint& checkpoint) {
    masters_ ? checkpoint.add("model", *masters_) : checkpoint.add("model", *model_);
    const auto name_of = [](const std::string& kind, std::size_t number) {
      return number == 0 ? kind : kind + std::to_string(number + 1);
    };
    for (std::size_t i = 0; i < optimizers_.size(); ++i) {
      checkpoint.add(name_of("optimizer", i), *optimizers_[i]);
    }
    checkpoint.add("scaler", *scaler_);
    for (std::size_t i = 0; i < schedulers_.size(); ++i) {
      schedulers_[i].add_to(checkpoint, name_of("scheduler", i));
    }
    checkpoint.add("steps", steps_);
    checkpoint.note_step([this](const std::string& call) { check_between_windows(call); });
  }

  /// The scaler.
  GradScaler& scaler() { return *scaler_; }
  /// The optimizer; with several optimizers, the optimizer with this number, from 0.
  torch::optim::Optimizer& optimizer(std::size_t number = 0) {
    TORCH_CHECK_INDEX(number < optimizers_.size(), "TrainingStep::optimizer: the number is ",
                      number, ", and there are ", optimizers_.size(), " optimizers.");
    return *optimizers_[number];
  }
  /// The MasterWeights, or `masters<ShardedMasterWeights>()`. An error if there are none.
  template <class Masters = MasterWeights>
  Masters& masters() {
    auto* const found = dynamic_cast<Masters*>(masters_.get());
    TORCH_CHECK(found, "TrainingStep::masters: there are no masters of this type. Set .masters.");
    return *found;
  }
  /// The guard's options, for your own regions.
  const AutocastOptions& autocast() const { return autocast_; }
  /// The device of the iteration.
  c10::Device device() const { return device_; }
  /// Number of steps taken or skipped. load() sets it to the number of the saved run.
  std::int64_t steps() const { return steps_; }
  /// Micro-batches since the last step.
  std::int64_t pending() const { return accumulation_ ? accumulation_->pending() : 0; }

 private:
  using MakeOptimizer = std::function<detail::OptimizerPointers(const NamedParameters&)>;

  TrainingStep(const detail::Model& model, TrainingStepOptions options, bool makes,
               const MakeOptimizer& make);
  static void check(const TrainingStepOptions& options, bool makes);
  void make_parts(TrainingStepOptions& options, const MakeOptimizer& make);
  void check_optimizer() const;
  template <class Checkpoint>
  Checkpoint checkpoint_of(const char* call, const std::string& path) {
    static_assert(
        requires { sizeof(Checkpoint); },
        "TrainingStep: include torchamp/training_checkpoint.h to write and read files.");
    check_between_windows(std::string("TrainingStep::") + call);
    Checkpoint checkpoint(path);
    add_to(checkpoint);
    return checkpoint;
  }

  void check_between_windows(const std::string& call) const {
    TORCH_CHECK(pending() == 0, call, ": ", pending(), " of ", micro_batches_,
                " micro-batches are pending, and a file does not hold their gradients. Call "
                "finish() first, or call this after the last micro-batch of a window.");
  }

  template <class Loss>
  TrainingResult iterate(Loss&& function) {
    if (pending() == 0) clear_gradients();
    const bool is_last = pending() + 1 == micro_batches_;
    const auto no_sync = group_ && !is_last ? group_->no_sync() : nullptr;
    const bool was_training = model_->is_training();
    const auto before = accumulation_ ? accumulation_->look() : Accumulation::Look{};
    at::Tensor loss;
    try {
      {
        const AutocastGuard autocast(device_.type(), autocast_);
        loss = group_ ? group_->forward([&]() -> at::Tensor { return function(); }) : function();
      }
      check_loss(loss);
    } catch (...) {
      if (accumulation_ && accumulation_->has_changed(before)) drop_window();
      throw;
    }
    if (accumulation_) accumulation_->accept_scaled(before);
    if (!was_training) warn_of_evaluation_mode();
    return learn(std::move(loss));
  }
  void warn_of_evaluation_mode();
  void check_loss(const at::Tensor& loss) const;
  TrainingResult learn(at::Tensor loss);
  void check_not_used() const;
  void check_no_backward(const detail::ScaleUse& use);
  static at::Tensor without_graph(at::Tensor&& loss);
  TrainingResult replay(const Tensors& inputs,
                        const std::function<at::Tensor(const Tensors&)>& function,
                        const std::type_info& type);
  void check_inputs_may_be_left_out();
  TrainingResult count(TrainingResult result);
  void clear_gradients();
  void complete_gradients();
  void drop_window();

  std::shared_ptr<torch::nn::Module> model_;
  c10::Device device_ = at::kCPU;
  AutocastOptions autocast_;
  std::optional<GradScaler> own_scaler_;
  GradScaler* scaler_;
  std::optional<double> max_grad_norm_;
  std::int64_t micro_batches_;
  std::unique_ptr<detail::StepGroup> group_;
  std::unique_ptr<detail::Masters> masters_;
  detail::OptimizerPointers optimizers_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;  // steps all optimizers
  std::optional<Accumulation> accumulation_;            // of several micro-batches
  std::vector<detail::StepScheduler> schedulers_;
  std::unique_ptr<detail::StepLog> log_;
  detail::StepCapture capture_;
  std::vector<double> captured_rules_;                                   // of the scaler
  const std::function<at::Tensor(const Tensors&)>* function_ = nullptr;  // that is captured
  bool has_run_body_ = false;  // in this call: then it is no replay
  bool captures_when_possible_ = false, warned_of_inputs_ = false;
  bool moves_inputs_ = false;  // to the device, as a graph would
  bool keeps_scale_ = false;   // each result has the scale of its step
  bool warned_ = false;        // of a backward() in the function
  bool warned_of_mode_ = false;
  detail::OneCaller caller_;
  at::Tensor norm_, scale_;  // of the present step
  std::int64_t steps_ = 0;
};

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/extras/training/training_step-inl.h"  // IWYU pragma: export
#endif
