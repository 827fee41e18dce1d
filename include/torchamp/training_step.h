// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief TrainingStep: a whole iteration of training in mixed precision, in one call.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/accumulation.h"
#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/detail/gradients/accumulation.h"
#include "torchamp/detail/masters/master_meta.h"
#include "torchamp/detail/training/default_dtype.h"
#include "torchamp/detail/training/parts.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/training_result.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class MasterWeights;

/// What a TrainingStep does. An aggregate, for designated initialisers:
/// `TrainingStep train(model, optimizer, {.max_grad_norm = 1., .micro_batches = 4});`
struct TrainingStepOptions {
  /// Where the iteration runs. Unset: where the model's parameters are.
  std::optional<c10::Device> device = std::nullopt;
  /// fp16, bf16, or fp32 for no casts. Unset: the masters', if there are any; fp16 on CUDA; on a
  /// CPU bf16 if it is fast there, else fp32, which a warning says once; elsewhere the device's
  /// autocast dtype. For a model in fp64, which is not cast, a warning.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// As AutocastOptions::policy.
  std::optional<Policy> policy = std::nullopt;
  /// GradScalerOptions, or a GradScaler that several TrainingSteps share and that outlives them.
  /// Unset: GradScalerOptions() for fp16, skip_non_finite() for bf16 and fp32.
  detail::ScalerChoice scaler = {};
  /// If set, gradients are clipped to this norm (clip_grad_norm_).
  std::optional<double> max_grad_norm = std::nullopt;
  /// How many calls make one step, with the gradients of the mean of their losses.
  std::int64_t micro_batches = 1;
  /// As AutocastOptions::cache; WeightCache::window casts each weight once for all micro-batches.
  std::optional<WeightCache> cache = std::nullopt;
  /// MasterWeightsOptions or, with a group, ShardedMasterWeightsOptions: the model in 16 bits, and
  /// masters of its weights for the optimizer, which a factory makes.
  detail::MastersChoice masters = {};
  /// A process group (torchamp/distributed/training_group.h), over which gradients are averaged, as
  /// DistributedDataParallel does, whatever forward the function calls. Or `{group, options}` with
  /// DistributedDataParallelOptions.
  detail::GroupChoice group = {};
  /// CudaGraphOptions: iterations are captured, and replayed. Not with a group, nor with several
  /// micro-batches.
  detail::CaptureChoice capture = {};
  /// A learning rate scheduler, or a function that makes one for the optimizer. Stepped after each
  /// step that was not skipped; asking for that waits for a GPU, also with a fused optimizer.
  detail::SchedulerChoice scheduler = {};
  /// A file (torchamp/training_log.h) to which step, loss, scale, skips, norm and time are written
  /// for each step, late enough not to wait for a device.
  detail::LogChoice log = {};
};

/// An iteration of training in mixed precision: a guard around the function that computes the loss,
/// then backward with a scaler, clipping, the step and the scale's update, in the order in which
/// they are right. It owns no loop.
///
///     torchamp::TrainingStep train(model, optimizer, {.max_grad_norm = 1.});
///     for (auto& batch : *loader)
///       train([&] { return torch::mse_loss(model->forward(batch.data), batch.target); });
///     train.finish();   // an incomplete window at the end; for micro-batches
///
/// It does what the parts do that it is made of, bit for bit: AutocastGuard, GradScaler,
/// Accumulation (with several micro-batches), clip_grad_norm_, MasterWeights,
/// DistributedDataParallel, CudaGraph. Each window, which is an iteration where micro_batches is 1,
/// begins by clearing the optimizer's gradients and ends with one step() and update() of the
/// scaler. Several TrainingSteps (of a GAN, say) live side by side.
///
/// An exception of the function leaves the window as it was without that micro-batch; one of the
/// rest (backward, the clip, the step, a limit of the scaler) drops the window. The next call is
/// right either way. Model, optimizer, scaler and scheduler that are given by reference outlive it.
/// One thread at a time.
///
/// Errors at construction: options that are out of range or cannot be together, by name; LBFGS,
/// which is stepped with a closure (torchamp/closure_step.h); fp16 parameters without masters. The
/// model is then as it was, also if the factory throws (but has the weights of a group's first
/// process, where there are masters as well).
class TrainingStep {
 public:
  /// What a factory may take instead of a vector of parameters.
  using NamedParameters = detail::NamedTensors;
  /// Inputs of an iteration that can be captured.
  using Tensors = detail::Tensors;

  /// `model`: a module, a pointer to one or a holder.
  TrainingStep(detail::StepModel model, torch::optim::Optimizer& optimizer,
               TrainingStepOptions options = {})
      : TrainingStep(
            std::move(model), std::move(options), /*makes=*/false, [&](const NamedParameters&) {
              return std::shared_ptr<torch::optim::Optimizer>(std::shared_ptr<void>(), &optimizer);
            }) {}

  /// `factory` makes the optimizer of the masters' parameters, or of the model's, and returns a
  /// pointer to it: `[](auto parameters) { return std::make_unique<FusedAdamW>(parameters, …); }`.
  /// It takes a std::vector of tensors or, where that is its parameter's type, NamedParameters.
  template <class Factory>
  requires(!std::derived_from<std::remove_cvref_t<Factory>, torch::optim::Optimizer>)
      TrainingStep(detail::StepModel model, Factory factory, TrainingStepOptions options = {})
      : TrainingStep(std::move(model), std::move(options), /*makes=*/true,
                     [&](const NamedParameters& named) -> std::shared_ptr<torch::optim::Optimizer> {
                       if constexpr (std::invocable<Factory&, Tensors>) {
                         Tensors parameters;
                         for (const auto& item : named) parameters.push_back(item.second);
                         return factory(std::move(parameters));
                       } else {
                         return factory(named);
                       }
                     }) {}

  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;
  /// A warning where a window is open: call finish() before.
  ~TrainingStep() {
    if (pending() == 0) return;
    detail::warn("TrainingStep: destroyed with ", pending(), " of ", micro_batches_,
                 " micro-batches, with which no step was made. Call finish() before.");
    accumulation_->discard();
  }

  /// An iteration. `loss` computes the loss, one number, from the parameters; it is called once,
  /// under the guard. An error with `.capture`.
  template <std::invocable Loss>
  TrainingResult operator()(Loss&& loss) {
    TORCH_CHECK(!capture_,
                "TrainingStep: with .capture the function's inputs are passed, since a replay runs "
                "no host code: train({batch.data, batch.target}, [&](const auto& inputs) {…}).");
    return count(iterate(loss));
  }

  /// An iteration that can be captured: `loss` computes the loss from `inputs`, and reads nothing
  /// else that changes. In a replay it is not called. See CudaGraph.
  template <std::invocable<const Tensors&> Loss>
  TrainingResult operator()(const Tensors& inputs, Loss&& loss) {
    const auto of_inputs = [&](const Tensors& given) -> at::Tensor { return loss(given); };
    if (!capture_) return count(iterate([&] { return of_inputs(inputs); }));
    return count(replay(inputs, of_inputs));
  }

  /// Steps with an incomplete window, at the end of an epoch, whose gradients are those of the sum
  /// of the losses over micro_batches. Nothing if none is open. With a group all processes call it.
  /// Then writes what the log still has, which waits for the device.
  std::optional<TrainingResult> finish();

  /// Calls `function` under the guard, without gradients and with all modules in evaluation mode,
  /// and returns what it returns. Each module's mode is put back, also after an exception.
  template <std::invocable Function>
  decltype(auto) evaluate(Function&& function) {
    const EvaluationMode mode(*model_);
    const at::NoGradGuard no_grad;
    const AutocastGuard autocast(device_.type(), autocast_);
    return std::forward<Function>(function)();
  }

  /// Writes a TrainingCheckpoint (torchamp/training_checkpoint.h) of all that it uses: model or
  /// masters, optimizer, scaler, scheduler, the number of steps, random states. With a group all
  /// processes call it, for one file. An error within a window.
  template <class Checkpoint = TrainingCheckpoint>
  void save(const std::string& path) {
    check_no_window("save");
    auto checkpoint = checkpoint_of<Checkpoint>(path);
    group_ ? group_->save(checkpoint) : checkpoint.save();
  }
  /// Goes on from such a file; false if there is none. As TrainingCheckpoint::load. An error within
  /// a window.
  template <class Checkpoint = TrainingCheckpoint>
  bool load(const std::string& path) {
    check_no_window("load");
    auto checkpoint = checkpoint_of<Checkpoint>(path);
    return group_ ? group_->load(checkpoint) : checkpoint.load();
  }
  /// Adds the same to a checkpoint of the program's own, as "model", "optimizer", "scaler",
  /// "scheduler" and "steps". Save and load that between windows.
  template <class Checkpoint>
  void add_to(Checkpoint& checkpoint) {
    masters_ ? checkpoint.add("model", *masters_) : checkpoint.add("model", *model_);
    checkpoint.add("optimizer", *optimizer_).add("scaler", *scaler_);
    if (scheduler_) scheduler_->add_to(checkpoint);
    checkpoint.add("steps", steps_);
  }

  /// The scaler.
  GradScaler& scaler() { return *scaler_; }
  /// The optimizer.
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  /// The MasterWeights; `masters<ShardedMasterWeights>()` for those. An error if there are none.
  template <class Masters = MasterWeights>
  Masters& masters() {
    auto* const found = dynamic_cast<Masters*>(masters_.get());
    TORCH_CHECK(found, "TrainingStep::masters: there are none of this type. Set .masters.");
    return *found;
  }
  /// The guard's options, for regions of the program's own.
  const AutocastOptions& autocast() const { return autocast_; }
  /// Where the iteration runs.
  c10::Device device() const { return device_; }
  /// How many steps were made or skipped, those before a load() included.
  std::int64_t steps() const { return steps_; }
  /// Micro-batches since the last step.
  std::int64_t pending() const { return accumulation_ ? accumulation_->pending() : 0; }

 private:
  using MakeOptimizer =
      std::function<std::shared_ptr<torch::optim::Optimizer>(const NamedParameters&)>;

  /// All modules in evaluation mode, until it ends.
  class EvaluationMode {
   public:
    explicit EvaluationMode(torch::nn::Module& model) : modes_{{&model, model.is_training()}} {
      for (const auto& module : model.modules(/*include_self=*/false)) {
        modes_.emplace_back(module.get(), module->is_training());
      }
      model.eval();
    }
    ~EvaluationMode() {
      for (const auto& [module, trains] : modes_) {  // a module comes before those in it
        if (module->is_training() != trains) module->train(trains);
      }
    }
    EvaluationMode(const EvaluationMode&) = delete;
    EvaluationMode& operator=(const EvaluationMode&) = delete;

   private:
    std::vector<std::pair<torch::nn::Module*, bool>> modes_;
  };

  TrainingStep(detail::StepModel model, TrainingStepOptions options, bool makes,
               const MakeOptimizer& make);
  static void check(const TrainingStepOptions& options, bool makes);
  void make_parts(TrainingStepOptions& options, const MakeOptimizer& make);
  void check_optimizer() const;
  void check_no_window(const char* call) const {
    TORCH_CHECK(pending() == 0, "TrainingStep::", call, ": ", pending(), " of ", micro_batches_,
                " micro-batches wait for their step, and files do not keep their gradients. Call "
                "finish() before, or call this after the window's last one.");
  }
  template <class Checkpoint>
  Checkpoint checkpoint_of(const std::string& path) {
    static_assert(
        requires { sizeof(Checkpoint); },
        "TrainingStep: include torchamp/training_checkpoint.h, which writes and reads "
        "files.");
    Checkpoint checkpoint(path);
    add_to(checkpoint);
    return checkpoint;
  }

  template <class Loss>
  TrainingResult iterate(Loss&& function) {
    if (pending() == 0) clear_gradients();
    const bool is_last = pending() + 1 == micro_batches_;
    const auto no_sync = group_ && !is_last ? group_->no_sync() : nullptr;
    at::Tensor loss;
    {
      const AutocastGuard autocast(device_.type(), autocast_);
      loss = group_ ? group_->forward([&]() -> at::Tensor { return function(); }) : function();
    }
    return learn(std::move(loss));
  }
  TrainingResult learn(at::Tensor loss);
  static at::Tensor without_graph(at::Tensor&& loss);
  TrainingResult replay(const Tensors& inputs,
                        const std::function<at::Tensor(const Tensors&)>& function);
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
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  FusedOptimizer* fused_ = nullptr;           // the optimizer, where it is one
  std::optional<Accumulation> accumulation_;  // of several micro-batches
  std::optional<detail::StepScheduler> scheduler_;
  std::unique_ptr<detail::StepLog> log_;
  detail::CaptureChoice::Capture capture_;
  const std::function<at::Tensor(const Tensors&)>* function_ = nullptr;  // that is captured
  bool keeps_scale_ = false;  // each result has the scale of its step
  at::Tensor norm_, scale_;   // of the step that is being made
  std::int64_t steps_ = 0;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/training/training_step_impl.h"  // IWYU pragma: export
