// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief CudaGraph: a whole training iteration, captured once and replayed.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
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

#include "torchamp/detail/core/autocast/empty_cast_cache.h"
#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/graph/captured_scale.h"
#include "torchamp/detail/extras/graph/iteration.h"
#include "torchamp/detail/extras/graph/make_recorder.h"
#include "torchamp/detail/extras/graph/recorder.h"
#include "torchamp/detail/extras/shared/model.h"
#include "torchamp/detail/extras/weights/derived.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class CudaGraph;

/// Options of a CudaGraph. An aggregate, for designated initialisers.
struct CudaGraphOptions {
  using Graph = CudaGraph;  ///< made with these options

  /// Iterations that run eagerly before the capture; at least 1. They create the scale, the
  /// optimizer's state and workspaces; the last one is searched for calls that synchronise.
  int64_t warmup = 3;
  /// False: each call runs the iteration eagerly, on any device.
  bool enabled = true;
  /// The models that the body calls, each a module, a pointer to one or a holder: after train() or
  /// eval() of one of them, or of a part of it, the iteration is captured again. A TrainingStep
  /// adds its own. Changes of other models' modes are not seen.
  std::vector<detail::Model> models = {};
};

/// Runs a whole training iteration as one graph of its device, a CUDA graph: zero_grad, forward
/// under a guard, scaled backward, unscale_, clip, a fused step and the scale's update are captured
/// once and then replayed with new inputs. A replay costs the host one launch instead of thousands.
///
///     torchamp::CudaGraph iteration(optimizer, [&](const std::vector<at::Tensor>& batch) {
///       optimizer.zero_grad();
///       torch::Tensor loss;
///       {
///         torchamp::AutocastGuard autocast(torch::kCUDA);
///         loss = torch::mse_loss(model->forward(batch[0]), batch[1]);
///       }
///       scaler.scale(loss).backward();
///       scaler.unscale_(optimizer);
///       torchamp::clip_grad_norm_(model->parameters(), 1.);
///       scaler.step(optimizer);
///       scaler.update();
///       return loss;
///     });
///     for (auto& batch : *loader) torch::Tensor loss = iteration({batch.data, batch.target})[0];
///
/// Every call is one iteration. The first `warmup` calls run eagerly, on a separate stream; the
/// next one captures the body, which is its last call, and replays; from then on a call only copies
/// the inputs and replays. The device handles overflow, skipped steps and the scale's growth
/// exactly like in eager iterations.
///
/// A replay runs no host code: what the body does on the host (counting, printing, choosing a
/// branch) happens for the last time in the capture. Learning rates may change at any time;
/// captured steps round them to fp32. After another change of an optimizer's options or state, a
/// step with gradients of other parameters (eager or in another graph), or train() or eval() of one
/// of `models`, the next call runs eagerly and the one after captures again. A GradScaler's factors
/// and intervals stay as captured; its scale may be set at any time.
///
/// `optimizers` are those that the body steps; they must take scale and overflow flag on the device
/// (torchamp's fused ones). Make the guard inside the body. Random numbers (dropout) continue from
/// replay to replay.
///
/// Threads: one call at a time, with the same current stream. Only the capture synchronises. A
/// replay waits at most for much earlier replays, when the host is so far ahead that the scale
/// could have fallen below 1 meanwhile: 16 replays at a scale of 65536. A step captured
/// for a scale from 1 to 2^32 is captured again if the scale leaves that range, where more must be
/// checked.
///
/// Memory: what the warm-ups create on the device (optimizer state, gradients, the scale) belongs
/// to the graph's own stream. The caller's stream may use it after any call, but it must not be
/// freed while later work of the caller's stream uses it: synchronize the device before you destroy
/// optimizer, scaler or model before the program ends.
///
/// Devices: CUDA, and with LibTorch 2.15 each one whose backend registers graphs
/// (REGISTER_GRAPH_IMPL in ATen/core/GraphImplInterface.h).
///
/// Errors at construction: an ordinary optimizer; parameters on several devices or on one without
/// graphs (a CPU, say); more graphs alive than LibTorch has streams per device (64 with CUDA). In
/// the first warm-up iteration: a body with DistributedDataParallel, or with a checkpoint() that
/// keeps the random state. In the last one, which still runs as usual: a body that synchronises
/// (with the op's name). In any call: inputs that do not fit, which change nothing. A capture that
/// fails (for lack of memory with c10::OutOfMemoryError) leaves weights, optimizer and scale
/// unchanged, and the next call captures again; after an error between unscale_ and update, first
/// call GradScaler::discard().
///
/// Source of the method: PyTorch's notes on CUDA graphs ("whole-network capture").
class CudaGraph {
 public:
  /// Inputs and outputs of an iteration.
  using Tensors = std::vector<at::Tensor>;
  /// The optimizers that an iteration steps.
  using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

  /// `body` takes the inputs and returns an at::Tensor, a std::vector of them, or nothing.
  template <std::invocable<const Tensors&> Body>
  CudaGraph(torch::optim::Optimizer& optimizer, Body body, CudaGraphOptions options = {})
      : CudaGraph(Optimizers{optimizer}, std::move(body), std::move(options)) {}

  /// For a body that steps several optimizers: `{std::ref(a), std::ref(b)}`.
  template <std::invocable<const Tensors&> Body>
  CudaGraph(Optimizers optimizers, Body body, CudaGraphOptions options = {})
      : CudaGraph(std::move(optimizers), wrap(std::move(body)), std::move(options),
                  &detail::make_graph_recorder) {}

  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  /// Runs an iteration on `batch`: tensors on the CPU (pinned ones are copied without waiting) or
  /// on the parameters' device, of the same shapes and dtypes in each call. Returns what the body
  /// returned, detached; the next call overwrites it, so clone() what you keep.
  const Tensors& operator()(const Tensors& batch);

  /// Whether the next call replays, if no option or state of an optimizer changes before, and no
  /// mode of a model.
  bool is_captured() const { return captured_; }

  /// Drops the graph and the inputs' shapes: the next calls warm up and capture again.
  void reset() {
    forget_capture();
    outputs_.clear();
    states_.clear();
    made_eagerly_.clear();
    if (inputs_) inputs_->reset();
    warmed_up_ = 0;
  }

  /// For the library's own tests: records with the result of `make_recorder`.
  template <class MakeRecorder>
  CudaGraph(Optimizers optimizers, std::function<Tensors(const Tensors&)> body,
            CudaGraphOptions options, MakeRecorder make_recorder)
      : optimizers_(std::move(optimizers)), body_(std::move(body)), options_(std::move(options)) {
    TORCH_CHECK_VALUE(
        options_.warmup >= 1, "CudaGraph: warmup is ", options_.warmup,
        ". At least one iteration must run eagerly, to create the optimizer's state.");
    for (const detail::Model& model : options_.models) {
      TORCH_CHECK_VALUE(model.get(), "CudaGraph: one of .models is null.");
    }
    if (!options_.enabled) return;
    const c10::Device device = check_optimizers();
    recorder_ = make_recorder(device);
    inputs_.emplace(device);
  }

 private:
  /// Wraps any body as one that returns a vector.
  template <class Body>
  static std::function<Tensors(const Tensors&)> wrap(Body body) {
    using Result = std::invoke_result_t<Body&, const Tensors&>;
    return [body = std::move(body)](const Tensors& batch) mutable -> Tensors {
      if constexpr (std::is_void_v<Result>) {
        body(batch);
        return {};
      } else if constexpr (std::convertible_to<Result, at::Tensor>) {
        return {body(batch)};
      } else {
        static_assert(std::convertible_to<Result, Tensors>,
                      "the body of a CudaGraph returns an at::Tensor, a std::vector<at::Tensor>, "
                      "or nothing");
        return body(batch);
      }
    };
  }

  c10::Device check_optimizers() const;
  bool prepare_optimizers();
  void call_body(const Tensors& batch);
  void warm_up();
  void capture();

  void forget_capture() {
    captured_ = false;
    if (recorder_) recorder_->reset();
  }

  Optimizers optimizers_;
  std::function<Tensors(const Tensors&)> body_;
  CudaGraphOptions options_;
  std::optional<detail::StaticInputs> inputs_;
  std::unique_ptr<detail::GraphRecorder> recorder_;
  Tensors outputs_;
  detail::ReplayedStates states_;
  std::vector<std::weak_ptr<const void>> made_eagerly_;
  Tensors kept_;              // until the caller's stream waits for the body's
  detail::ModelModes modes_;  // of the models in the last call of the body
  int64_t warmed_up_ = 0;
  bool captured_ = false;
  std::vector<double> rates_;
};

inline const CudaGraph::Tensors& CudaGraph::operator()(const Tensors& batch) {
  if (!options_.enabled) {
    call_body(batch);
    return outputs_;
  }
  inputs_->fill(batch);
  const bool prepared = prepare_optimizers() && modes_.hold();
  const auto is_gone = [](const auto& made) { return made.expired(); };
  if (!prepared || warmed_up_ < options_.warmup || std::ranges::any_of(made_eagerly_, is_gone)) {
    forget_capture();
    warm_up();
    return outputs_;
  }
  const auto holds = [](const auto& state) { return state->holds(); };
  if (captured_ && !std::all_of(states_.begin(), states_.end(), holds)) forget_capture();
  if (captured_) {
    for (torch::optim::Optimizer& optimizer : optimizers_) {
      if (auto* const step = dynamic_cast<CapturedStep*>(&optimizer)) step->note_replayed_step();
    }
    for (const auto& state : states_) state->note_replay();
  } else {
    capture();
  }
  recorder_->replay();
  for (const auto& state : states_) {
    if (state->wants_look()) recorder_->run([&] { state->look(); });
  }
  if (auto* const kept = detail::kept_weights()) kept->all_changed();
  return outputs_;
}

/// Their parameters' device, if they can be captured.
inline c10::Device CudaGraph::check_optimizers() const {
  TORCH_CHECK_VALUE(!optimizers_.empty(),
                    "CudaGraph: no optimizer. Pass those that the iteration steps.");
  std::optional<c10::Device> device;
  for (torch::optim::Optimizer& optimizer : optimizers_) {
    TORCH_CHECK_TYPE(
        dynamic_cast<ScaledStep*>(&optimizer),
        "CudaGraph: an ordinary optimizer decides on the host whether and how to step, "
        "which a graph cannot hold. Use torchamp's FusedAdam, FusedAdamW, FusedSGD or "
        "FusedAdagrad, or another one that implements ScaledStep.");
    detail::any_parameter(optimizer, [&](const at::Tensor& parameter) {
      TORCH_CHECK_VALUE(!device || *device == parameter.device(),
                        "CudaGraph: there are parameters on ", *device, " and on ",
                        parameter.device(), ", but a graph belongs to one device.");
      device = parameter.device();
      return false;
    });
  }
  TORCH_CHECK_VALUE(device, "CudaGraph: the optimizers have no parameters.");
  return *device;
}

/// Whether the next iteration may be captured or replayed, according to the optimizers. For those
/// without CapturedStep, the learning rates decide.
inline bool CudaGraph::prepare_optimizers() {
  bool prepared = true;
  std::vector<double> rates;
  for (torch::optim::Optimizer& optimizer : optimizers_) {
    if (auto* const step = dynamic_cast<CapturedStep*>(&optimizer)) {
      prepared &= step->prepare_captured_step();
    } else {
      for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
    }
  }
  prepared &= !captured_ || rates == rates_;
  rates_ = std::move(rates);
  return prepared;
}

inline void CudaGraph::call_body(const Tensors& batch) {
  outputs_.clear();
  std::optional<detail::GraphBody> is_to_be_captured;
  static const detail::FollowsReplays follower;
  if (options_.enabled) {
    is_to_be_captured.emplace(&follower);
    modes_ = detail::ModelModes(options_.models);
  }
  Tensors outputs = body_(batch);
  if (is_to_be_captured) {
    states_ = std::move(is_to_be_captured->states);
    made_eagerly_ = std::move(is_to_be_captured->made_eagerly);
    kept_ = std::move(is_to_be_captured->kept);
  }
  for (at::Tensor& output : outputs) {
    if (output.defined()) output = output.detach();  // releases the autograd graph
  }
  outputs_ = std::move(outputs);
}

inline void CudaGraph::warm_up() {
  std::string access;
  recorder_->run([&] {
    if (warmed_up_ + 1 < options_.warmup) return call_body(inputs_->tensors());
    const detail::HostAccessWatch watch(recorder_->device_type());
    call_body(inputs_->tensors());
    access = watch.first();
  });
  kept_.clear();
  TORCH_CHECK(access.empty(),
              "CudaGraph: the iteration makes host and device wait for each other, which a graph "
              "cannot hold: ",
              access,
              ". Return values from the body instead of reading them in it, and make tensors "
              "outside of it. This iteration ran as usual; nothing was captured.");
  warmed_up_ = std::min(warmed_up_ + 1, options_.warmup);
}

// Note [Weight casts and capture]
// LibTorch's autocast cache may hold a weight's cast from before the capture, in memory that
// replays do not write: a captured iteration that used it would train with old weights. And a cast
// made in the capture has no value until the first replay. So the cache is emptied before and
// after. Inside, the end of a guard empties it as usual, and each replay repeats the casts, as each
// eager iteration does.
inline void CudaGraph::capture() {
  const detail::EmptyCastCache without_earlier_casts;
  const detail::DerivedWeights::Suspension no_casts_are_kept(detail::derived_weights());
  std::vector<detail::WeakTensor> gradients;  // which are not kept alive
  for (const torch::optim::Optimizer& optimizer : optimizers_) {
    detail::any_gradient(optimizer, [&](const at::Tensor& gradient) {
      gradients.emplace_back(gradient);
      return false;
    });
  }
  for (const auto& state : states_) recorder_->run([&] { state->settle(); });
  // After a failure the device has executed nothing of the body: its gradients have no values, and
  // its step was not made, which only the device knows.
  auto forget = c10::make_scope_exit([&] {
    outputs_.clear();
    for (torch::optim::Optimizer& optimizer : optimizers_) {
      detail::any_parameter(optimizer, [&](const at::Tensor& parameter) {
        const at::Tensor& gradient = detail::gradient_of(parameter);
        const auto is_it = [&](const detail::WeakTensor& before) { return before.is(gradient); };
        if (std::ranges::none_of(gradients, is_it)) parameter.mutable_grad().reset();
        return false;
      });
      if (auto* const step = dynamic_cast<CapturedStep*>(&optimizer)) step->note_replayed_step();
    }
  });
  try {
    recorder_->record([this] { call_body(inputs_->tensors()); });
  } catch (const c10::OutOfMemoryError& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false,
                     "CudaGraph: there is not enough memory to capture the iteration, though it "
                     "ran eagerly ",
                     warmed_up_,
                     " times: a graph has its own memory. Free some, or use a smaller batch and "
                     "call reset(). The error was: ",
                     error.what_without_backtrace());
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "CudaGraph: the iteration cannot be captured, though it ran eagerly ",
                warmed_up_,
                " times. The usual reason is an autograd graph of an earlier eager step "
                "that is still alive: let go of its loss. The error was: ",
                error.what_without_backtrace());
  }
  forget.release();
  captured_ = true;
}

}  // namespace TORCHAMP_NAMESPACE
