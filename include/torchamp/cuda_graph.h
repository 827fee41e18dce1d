// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. CudaGraph: a whole training iteration, captured once and replayed.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/kernels.h"
#include "torchamp/detail/extras/graph/captured_iteration.h"
#include "torchamp/detail/extras/graph/make_recorder.h"
#include "torchamp/detail/extras/graph/recorder.h"
#include "torchamp/detail/extras/shared/captured_call.h"
#include "torchamp/detail/extras/shared/model.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class CudaGraph;

/// Options of a CudaGraph. An aggregate, for designated initialisers.
struct CudaGraphOptions {
  using Graph = CudaGraph;  ///< the class of these options

  /// Number of iterations that run eagerly before the capture; at least 1. They create the scale,
  /// the optimizer's state and workspaces. In the last of them, the CudaGraph detects calls that
  /// synchronise: an error, unless when_possible is set.
  int64_t warmup = 3;
  /// False: each call runs the iteration eagerly, on any device.
  bool enabled = true;
  /// The models that the body calls: modules, pointers to modules, or holders. The iteration is
  /// captured again after train() or eval() of a module in these models. It is also captured again
  /// if a weight or buffer gets other memory (set_data()) or another requires_grad. A TrainingStep
  /// adds its own model. Changes of other models, and replaced modules, are not detected.
  std::vector<detail::Model> models = {};
  /// Maximum number of graphs. Each combination of the inputs' shapes and dtypes has its own graph
  /// and its own warm-ups; all graphs share their memory. At the maximum, a new combination first
  /// warms up. If the least recently called graph was not called during these warm-ups, the new
  /// graph then replaces it. Otherwise the new combination runs eagerly. With 1, another shape is
  /// an error, unless when_possible is set.
  int64_t shapes = 1;
  /// True: iterations that cannot be captured run eagerly (an ordinary optimizer, a body that reads
  /// the device, inputs that require grad, a device without graphs, …), and one warning names the
  /// reason. Iterations that a replay would compute wrongly also run eagerly; see CudaGraph.
  bool when_possible = false;
};

/// Runs a whole training iteration as one graph of its device, a CUDA graph: zero_grad, forward
/// under a guard, scaled backward, unscale_, clip, a fused step and the scale's update are captured
/// once and then replayed with new inputs. A replay costs the host one launch instead of hundreds.
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
/// Every call is one iteration. The first `warmup` calls run the body eagerly, on a separate
/// stream. The next call runs the body for the last time, to capture it, and replays. From then on
/// a call only copies the inputs and replays. The device handles overflow, skipped steps and the
/// scale's growth exactly as in eager iterations.
///
/// A replay runs no host code: counting, printing or choosing a branch in the body happens for the
/// last time in the capture. Learning rates may change at any time; captured steps round them to
/// fp32. The scale of a GradScaler may be set at any time; its factors and intervals are frozen at
/// capture (a TrainingStep captures again if they change).
///
/// After certain changes, the next call runs eagerly, and the call after it captures again:
///  - an optimizer's options or state have changed, except for learning rates;
///  - an optimizer has taken a step, eagerly or in another graph, in which other parameters had
///    gradients than in the captured step;
///  - train() or eval() was called, or a weight or buffer has other memory or another
///    requires_grad, in one of `models`.
///
/// All other values that the body reads from the host are frozen at capture, and so are LibTorch's
/// settings, for example TF32. If there are two or more warm-ups, the CudaGraph compares the ops,
/// numbers and tensors of the capture with the last warm-up. If they differ, it warns once; with
/// `when_possible`, the iteration then runs eagerly.
///
/// If a graph reads memory that was freed since its capture, the iteration is captured again. If
/// this happens a second time, the call throws; with `when_possible`, the iteration then runs
/// eagerly.
///
/// `optimizers` are the optimizers that the body steps; they must take scale and overflow flag on
/// the device, as torchamp's fused optimizers do. Create the guard inside the body. Random numbers
/// (dropout) continue from replay to replay.
///
/// Threads: one call at a time, with the same current stream. Only the capture synchronises.
///
/// Memory: tensors that the warm-ups create on the device (optimizer state, gradients, the scale)
/// belong to the graph's own stream. The caller's stream may use them after any call, but they must
/// not be freed while the caller's stream still uses them. So synchronise the device before you
/// destroy optimizer, scaler or model, unless the program ends.
///
/// Devices: CUDA, and with LibTorch 2.15 each device whose backend registers graphs
/// (REGISTER_GRAPH_IMPL in ATen/core/GraphImplInterface.h).
///
/// Errors:
///  - At construction: an ordinary optimizer; parameters on several devices, or on a device without
///    graphs such as a CPU; more CudaGraphs alive than LibTorch has streams per device (64 with
///    CUDA).
///  - In the first warm-up: a body with DistributedDataParallel, or with a checkpoint() that
///    preserves the random state.
///  - In the last warm-up, which still trains as usual: a body that synchronises or draws random
///    numbers on the host (the error names the op).
///  - In any call: inputs that are undefined, not strided or on another device, or that require
///    grad, or whose shapes and dtypes `shapes` does not allow. Nothing is changed.
///  - A capture that fails (if memory runs out, with c10::OutOfMemoryError). Weights, optimizer and
///    scale are unchanged, and the next call captures again. After an error between unscale_ and
///    update, first call GradScaler::discard().
///
/// Source of the method: PyTorch's notes on CUDA graphs ("whole-network capture").
class CudaGraph {
 public:
  /// Inputs and outputs of an iteration.
  using Tensors = std::vector<at::Tensor>;
  /// The optimizers that an iteration steps.
  using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

  /// `body` takes the inputs and returns an at::Tensor, a std::vector of tensors, or nothing.
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

  /// Runs an iteration on `batch`: tensors on the CPU (pinned tensors are copied without waiting)
  /// or on the parameters' device. Shapes and dtypes are the same in each call, unless you set
  /// `shapes`. The body gets copies, with the memory layout of the first call's inputs. Returns the
  /// body's results, detached. The next call overwrites them: clone() results that you keep.
  const Tensors& operator()(const Tensors& batch) { return run(batch, {}).tensors; }

  /// Whether there is a graph for the shapes and dtypes of the latest call. After a change that
  /// requires a new capture, this stays true until the next call.
  bool is_captured() const { return latest_ && latest_->is_captured(); }

  /// Drops the graphs and the inputs' shapes: the next calls warm up and capture again.
  void reset() {
    latest_ = nullptr;
    iterations_.clear();
    work_.outputs = {};
    work_.warned = false;
  }

  /// For the library's own headers: a call of a TrainingStep.
  const detail::BodyResult& run(const Tensors& batch, const detail::CapturedCall& call);

  /// For the library's own headers: calls `work` on the stream of the graphs.
  void run_eagerly(const std::function<void()>& work) { recorder_ ? recorder_->run(work) : work(); }

  /// For the library's own headers: the next calls capture again.
  void capture_again() {
    for (const auto& one : iterations_) one->forget_capture();
  }

  /// For the library's own tests: records with the result of `make_recorder`.
  template <class MakeRecorder>
  CudaGraph(Optimizers optimizers, std::function<detail::BodyResult(const Tensors&)> body,
            CudaGraphOptions options, MakeRecorder make_recorder)
      : options_(std::move(options)),
        work_{.optimizers = std::move(optimizers),
              .body = std::move(body),
              .models = options_.models,
              .warmup = options_.warmup,
              .when_possible = options_.when_possible} {
    TORCH_CHECK_VALUE(
        options_.warmup >= 1, "CudaGraph: warmup is ", options_.warmup,
        ". At least one iteration must run eagerly, to create the optimizer's state.");
    TORCH_CHECK_VALUE(options_.shapes >= 1, "CudaGraph: shapes is ", options_.shapes,
                      ". It must be 1 or more. To capture nothing, pass {.enabled = false}.");
    for (const detail::Model& model : options_.models) {
      TORCH_CHECK_VALUE(model.get(), "CudaGraph: a pointer in .models is null. Leave it out.");
    }
    if (!options_.enabled) return;
    try {
      device_ = check_optimizers();
      recorder_ = make_recorder(*device_);
    } catch (const c10::Error& error) {
      if (!options_.when_possible) throw;
      for (torch::optim::Optimizer& optimizer : work_.optimizers) {
        detail::any_parameter(optimizer, [this](const at::Tensor& parameter) {
          device_ = parameter.device();
          return true;
        });
      }
      work_.warn_of_eager(error.what_without_backtrace());
    }
  }

 private:
  /// Wraps any body in a function that returns a vector.
  template <class Body>
  static std::function<detail::BodyResult(const Tensors&)> wrap(Body body) {
    using Result = std::invoke_result_t<Body&, const Tensors&>;
    return [body = std::move(body)](const Tensors& batch) mutable -> detail::BodyResult {
      if constexpr (std::is_void_v<Result>) {
        body(batch);
        return {};
      } else if constexpr (std::convertible_to<Result, at::Tensor>) {
        return Tensors{body(batch)};
      } else if constexpr (std::same_as<Result, detail::BodyResult>) {
        return body(batch);
      } else {
        static_assert(std::convertible_to<Result, Tensors>,
                      "the body of a CudaGraph returns an at::Tensor, a std::vector<at::Tensor>, "
                      "or nothing");
        return Tensors(body(batch));
      }
    };
  }

  c10::Device check_optimizers() const;
  detail::CapturedIteration* iteration_for(const Tensors& batch, const detail::CapturedCall& call);
  bool make_room_for(const detail::CapturedIteration& wanting);

  using Iterations = std::vector<std::unique_ptr<detail::CapturedIteration>>;
  void drop(Iterations::iterator one) {
    if (latest_ == one->get()) latest_ = nullptr;
    iterations_.erase(one);
  }

  CudaGraphOptions options_;
  detail::GraphWork work_;
  std::optional<c10::Device> device_;
  std::unique_ptr<detail::GraphRecorder> recorder_;  // null if all iterations are eager
  Iterations iterations_;
  detail::CapturedIteration* latest_ = nullptr;
  bool has_replayed_ = false;  // in the latest call
  int64_t now_ = 0;            // calls
};

inline const detail::BodyResult& CudaGraph::run(const Tensors& batch,
                                                const detail::CapturedCall& call) {
  if (!recorder_) {
    work_.call(options_.enabled && device_ ? detail::inputs_on(*device_, batch) : batch);
    return work_.outputs;
  }
  ++now_;
  detail::CapturedIteration* const iteration = iteration_for(batch, call);
  if (latest_ && latest_ != iteration && !call.in_window) latest_->drop_gradients();
  const bool follows = std::exchange(has_replayed_, false) && latest_ &&
                       latest_->micro_batch() + 1 == call.micro_batch;
  latest_ = iteration;
  if (!iteration) {
    recorder_->run([&] { work_.call(detail::inputs_on(*device_, batch)); });
    return work_.outputs;
  }
  bool prepared = true;
  for (torch::optim::Optimizer& optimizer : work_.optimizers) {
    if (auto* const step = dynamic_cast<CapturedStep*>(&optimizer)) {
      prepared &= step->prepare_captured_step();
    }
  }
  const bool may_capture =
      (follows || call.micro_batch == 0) && (iteration->is_captured() || make_room_for(*iteration));
  has_replayed_ = iteration->run(batch, call, prepared, may_capture, now_);
  return work_.outputs;
}

/// The iteration for `batch`, which may be new; null if there is none for it, so the call runs
/// eagerly.
inline detail::CapturedIteration* CudaGraph::iteration_for(const Tensors& batch,
                                                           const detail::CapturedCall& call) {
  for (const auto& one : iterations_) {
    if (one->is_for(batch, call)) return one.get();
  }
  const auto is_other = [&](const auto& one) { return one->micro_batch() != call.micro_batch; };
  const auto first = std::ranges::find_if_not(iterations_, is_other);
  if (first != iterations_.end() && options_.shapes == 1 && !options_.when_possible) {
    (*first)->check(batch, call);
  }
  auto made =
      std::make_unique<detail::CapturedIteration>(work_, *device_, recorder_->another(), call);
  try {
    made->check(batch, call);
  } catch (const c10::Error& error) {
    if (!options_.when_possible) throw;
    work_.warn_of_eager(error.what_without_backtrace());
    return nullptr;
  }
  if (iterations_.end() - first - std::count_if(first, iterations_.end(), is_other) >
      2 * options_.shapes) {
    const auto rank = [&](const auto& one) {
      return std::tuple(is_other(one), one->is_captured(), one->last_call());
    };
    drop(std::ranges::min_element(iterations_, {}, rank));
  }
  return iterations_.emplace_back(std::move(made)).get();
}

/// Whether `wanting` may have a graph. If there are already `shapes` graphs, the least recently
/// called graph is dropped, provided that `wanting` was called `warmup` times since.
inline bool CudaGraph::make_room_for(const detail::CapturedIteration& wanting) {
  if (!wanting.may_capture()) return false;
  const auto is_captured = [&](const auto& one) {
    return one->is_captured() && one->micro_batch() == wanting.micro_batch();
  };
  if (std::ranges::count_if(iterations_, is_captured) < options_.shapes) return true;
  const auto rank = [&](const auto& one) { return std::pair(!is_captured(one), one->last_call()); };
  const auto oldest = std::ranges::min_element(iterations_, {}, rank);
  if ((*oldest)->last_call() >= wanting.first_of_latest()) return false;
  drop(oldest);
  return true;
}

/// Returns the device of the optimizers' parameters. Throws if the optimizers cannot be captured.
inline c10::Device CudaGraph::check_optimizers() const {
  TORCH_CHECK_VALUE(
      !work_.optimizers.empty(),
      "CudaGraph: there is no optimizer. Pass the optimizers that the iteration steps.");
  std::optional<c10::Device> device;
  for (torch::optim::Optimizer& optimizer : work_.optimizers) {
    TORCH_CHECK_TYPE(
        dynamic_cast<ScaledStep*>(&optimizer),
        "CudaGraph: an ordinary optimizer decides on the host whether and how to step, "
        "which a graph cannot hold. Use torchamp's ",
        detail::FusedNames::text(), ", or another one that implements ScaledStep.");
    detail::any_parameter(optimizer, [&](const at::Tensor& parameter) {
      TORCH_CHECK_VALUE(!device || *device == parameter.device(),
                        "CudaGraph: there are parameters on ", *device, " and on ",
                        parameter.device(),
                        ", but a graph belongs to one device. Move the model to one device.");
      device = parameter.device();
      return false;
    });
  }
  TORCH_CHECK_VALUE(device,
                    "CudaGraph: the optimizers have no parameters. Pass the optimizers that the "
                    "iteration steps.");
  return *device;
}

}  // namespace TORCHAMP_NAMESPACE
