// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/graph/body_trace.h"
#include "torchamp/detail/extras/graph/graph_work.h"
#include "torchamp/detail/extras/graph/iteration.h"
#include "torchamp/detail/extras/graph/recorder.h"
#include "torchamp/detail/extras/shared/captured_call.h"
#include "torchamp/detail/extras/shared/model.h"
#include "torchamp/detail/extras/weights/derived.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [States of a captured iteration]
// A CudaGraph has an iteration for each combination of its inputs' shapes, their dtypes and the
// number of the micro-batch in a window.
//
//   warming   runs eagerly, on the stream of its graphs. The last warm-up is searched for what a
//             graph cannot hold.
//   captured  replays. After a change that the graph does not hold (an optimizer's option or state,
//             a mode, a weight's memory, …) runs once eagerly, and is then captured again.
//   eager     for good, with .when_possible: the warm-up found something, the capture failed, or
//             what the body took from the host has changed.
//
// Each call ends in one of these states. A call that throws does not change the state.
//
// The graph of a micro-batch adds to the gradients of the previous micro-batch's graph. It is
// captured directly after the previous graph was replayed. It is replayed only if the parameters
// have the gradients of that graph; if the previous micro-batch ran eagerly, it also runs eagerly.

/// One iteration of a CudaGraph: see Note [States of a captured iteration].
class CapturedIteration {
 public:
  CapturedIteration(GraphWork& work, c10::Device device, std::unique_ptr<GraphRecorder> recorder,
                    const CapturedCall& call)
      : function_(call.function),
        micro_batch_(call.micro_batch),
        work_(work),
        recorder_(std::move(recorder)),
        inputs_(device) {}

  std::int64_t micro_batch() const { return micro_batch_; }
  /// Whether `batch` has the shapes and dtypes of this iteration, for the same type of function.
  bool is_for(const Tensors& batch, const CapturedCall& call) const {
    return micro_batch_ == call.micro_batch && is_of(call.function) && inputs_.fit(batch);
  }
  /// Throws an error with the reason if is_for() is false.
  void check(const Tensors& batch, const CapturedCall& call) const {
    inputs_.check(batch);
    TORCH_CHECK(is_of(call.function),
                "TrainingStep: the function is another one than in the first call, and a replay "
                "would not call it. Pass the same lambda expression in each call, or set "
                "CudaGraphOptions::shapes, so that each function has its own graph.");
  }

  bool is_captured() const { return captured_; }
  /// Whether the next call captures, if the number of graphs allows it.
  bool may_capture() const { return !captured_ && !eager_ && warmed_up_ >= work_.warmup; }
  /// When it was called: the latest time, and the first of the latest `warmup`.
  std::int64_t last_call() const { return calls_.empty() ? 0 : calls_.back(); }
  std::int64_t first_of_latest() const { return calls_.empty() ? 0 : calls_.front(); }

  /// Runs an iteration at `now`, and returns whether it was replayed. `prepared`: the optimizers
  /// step as before; `may_capture`: the number of graphs allows a capture, and the previous
  /// micro-batch was replayed.
  bool run(const Tensors& batch, const CapturedCall& call, bool prepared, bool may_capture,
           std::int64_t now);

  void forget_capture() {
    captured_ = false;
    outputs_ = {};
    outer_memory_.clear();
    before_ = after_ = GradientList();
    recorder_->reset();
  }
  /// Drops the gradients that the graph has made, before another graph's replay.
  void drop_gradients() {
    for (const auto& [parameter, gradient] : gradients_) {
      if (gradient.is(gradient_of(parameter))) parameter.mutable_grad().reset();
    }
    gradients_.clear();
  }

 private:
  bool is_of(const std::type_info* function) const {
    return function == function_ || (function && function_ && *function == *function_);
  }
  void call_body(bool in_capture);
  bool warm_up();
  bool run_eagerly() {
    recorder_->run([this] { work_.call(inputs_.tensors()); });
    return false;
  }
  bool run_between_replays() {
    recorder_->run([this] { call_body(/*in_capture=*/false); });
    kept_.clear();
    return false;
  }
  bool is_unchanged() const;
  std::vector<double> rates() const;
  void note_call(std::int64_t now) {
    calls_.push_back(now);
    if (static_cast<std::int64_t>(calls_.size()) > work_.warmup) calls_.erase(calls_.begin());
  }
  /// From now on runs eagerly, or throws.
  void refuse(const std::string& why) {
    forget_capture();
    TORCH_CHECK(work_.when_possible, why);
    eager_ = true;
    work_.warn_of_eager(why);
  }
  bool reads_memory_that_is_gone();
  std::string record();
  void compare_with_warm_up(const BodyTrace& trace);
  void capture(const CapturedCall& call);
  void replay();

  const std::type_info* function_;
  std::int64_t micro_batch_;
  GraphWork& work_;
  std::unique_ptr<GraphRecorder> recorder_;
  StaticInputs inputs_;
  std::vector<std::int64_t> calls_;
  std::int64_t warmed_up_ = 0;
  bool captured_ = false, eager_ = false;
  // Of the last call of the body:
  ReplayedStates states_;
  std::vector<std::weak_ptr<const void>> made_eagerly_;
  Tensors kept_;  // until the caller's stream waits for the body's
  SeenModels seen_;
  bool with_gradients_ = true, in_inference_ = false;
  std::vector<double> rates_;
  std::string refusal_;
  std::shared_ptr<const BodyTrace> warm_up_trace_;  // from the second warm-up on
  // Of the capture:
  BodyResult outputs_;
  std::vector<std::pair<at::Tensor, WeakTensor>> gradients_;  // by parameter
  GradientList before_, after_;                               // of a micro-batch
  std::vector<WeakMemory> outer_memory_;
  int freed_ = 0;
};

/// The learning rates, except of optimizers with CapturedStep, which handle their own.
inline std::vector<double> CapturedIteration::rates() const {
  std::vector<double> rates;
  for (torch::optim::Optimizer& optimizer : work_.optimizers) {
    if (dynamic_cast<CapturedStep*>(&optimizer)) continue;
    for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  }
  return rates;
}

/// Whether modes, weights and learning rates are unchanged since the last call of the body.
inline bool CapturedIteration::is_unchanged() const {
  return (!captured_ || rates() == rates_) && seen_.hold() &&
         with_gradients_ == at::GradMode::is_enabled() &&
         in_inference_ == c10::InferenceMode::is_enabled();
}

inline bool CapturedIteration::run(const Tensors& batch, const CapturedCall& call, bool prepared,
                                   bool may_capture, std::int64_t now) {
  inputs_.fill(batch);
  note_call(now);
  if (eager_) return run_eagerly();
  const auto is_gone = [](const auto& made) { return made.expired(); };
  if (!prepared || warmed_up_ < work_.warmup || !is_unchanged() ||
      std::ranges::any_of(made_eagerly_, is_gone) || reads_memory_that_is_gone()) {
    if (eager_) return run_eagerly();
    forget_capture();
    return warm_up();
  }
  const bool fits_in = micro_batch_ == 0 || before_.are_attached();
  const auto holds = [](const auto& state) { return state->holds(); };
  if (!captured_ || !fits_in || !std::all_of(states_.begin(), states_.end(), holds)) {
    if (!may_capture) return run_between_replays();
    forget_capture();
  }
  if (captured_) {
    for (torch::optim::Optimizer& optimizer : work_.optimizers) {
      auto* const step = dynamic_cast<CapturedStep*>(&optimizer);
      if (step && call.steps) step->note_replayed_step();
    }
    for (const auto& state : states_) state->note_replay();
  } else {
    capture(call);
    if (eager_) return run_eagerly();
  }
  replay();
  if (call.in_window) after_.attach();
  return true;
}

inline void CapturedIteration::replay() {
  recorder_->replay();
  work_.outputs = outputs_;
  for (const auto& state : states_) {
    if (state->wants_look()) recorder_->run([&] { state->look(); });
  }
  if (auto* const kept = kept_weights()) kept->all_changed();
}

inline void CapturedIteration::call_body(bool in_capture) {
  GraphBody body;
  body.may_refuse = work_.when_possible && !in_capture;
  SeenModels seen(work_.models);
  for (torch::optim::Optimizer& optimizer : work_.optimizers) {
    any_parameter(optimizer, [&](const at::Tensor& parameter) {
      seen.add(parameter);
      return false;
    });
  }
  seen_ = std::move(seen);
  rates_ = rates();
  with_gradients_ = at::GradMode::is_enabled();
  in_inference_ = c10::InferenceMode::is_enabled();
  work_.call(inputs_.tensors());
  if (in_capture) outputs_ = work_.outputs;
  states_ = std::move(body.states);
  made_eagerly_ = std::move(body.made_eagerly);
  kept_ = std::move(body.kept);
  refusal_ = std::move(body.refusal);
}

inline bool CapturedIteration::warm_up() {
  std::string access;
  recorder_->run([&] {
    if (warmed_up_ + 1 < work_.warmup) return call_body(/*in_capture=*/false);
    const HostAccessWatch watch(recorder_->device_type());
    const auto trace = std::make_shared<BodyTrace>(recorder_->device_type());
    {
      const Observation observation("CudaGraph", trace, Watched::ops);
      call_body(/*in_capture=*/false);
    }
    access = watch.first();
    if (warmed_up_ > 0) warm_up_trace_ = trace;  // the first one may create objects for all
  });
  kept_.clear();
  if (!refusal_.empty()) {
    refuse(refusal_);
  } else if (!access.empty()) {
    refuse(
        "CudaGraph: the iteration makes host and device wait for each other, which a graph "
        "cannot hold: " +
        access +
        ". Return values from the body instead of reading them in it, and make tensors outside of "
        "it. This iteration ran as usual; nothing was captured.");
  }
  warmed_up_ = std::min(warmed_up_ + 1, work_.warmup);
  return false;
}

/// Whether the graph reads memory that the program has freed. The first time, the iteration is
/// captured again with the present memory. The second time it is an error; with when_possible the
/// iteration runs eagerly.
inline bool CapturedIteration::reads_memory_that_is_gone() {
  const auto is_gone = [](const WeakMemory& memory) { return memory.is_gone(); };
  if (!captured_ || std::ranges::none_of(outer_memory_, is_gone)) return false;
  if (freed_++ > 0) {
    refuse(
        "CudaGraph: the iteration reads a tensor that is not among its inputs and that the program "
        "has freed since the capture, so a replay would read what is there now. Pass the tensor as "
        "an input (a body that captures by reference must not use the batch itself), or keep it "
        "alive and write to it in place.");
  }
  return true;
}

/// Warns if the capture has read other values from the host than the last warm-up.
inline void CapturedIteration::compare_with_warm_up(const BodyTrace& trace) {
  if (!warm_up_trace_) return;
  const std::string difference = warm_up_trace_->difference(trace);
  if (difference.empty()) return;
  const std::string text =
      "CudaGraph: the iteration is not the same in each call, and a replay repeats what was "
      "captured: " +
      difference + ".";
  if (work_.when_possible) return refuse(text);
  if (!std::exchange(work_.warned, true)) TORCH_WARN(text, " This warning is given once.");
}

// Note [Weight casts and capture]
// LibTorch's autocast cache may hold a weight's cast from before the capture, in memory that
// replays do not write. If a captured iteration used it, it would train with old weights. And a
// cast made in the capture has no value until the first replay. So the cache is emptied before and
// after the capture. Inside, the end of a guard empties it as usual, so each replay repeats the
// casts, as each eager iteration does.
inline void CapturedIteration::capture(const CapturedCall& call) {
  const EmptyCastCache without_earlier_casts;
  const DerivedWeights::Suspension no_casts_are_kept(derived_weights());
  if (call.in_window) before_ = GradientList(work_);
  gradients_.clear();
  const Snapshot before([this](const auto& f) {
    return std::ranges::any_of(work_.optimizers, [&](const torch::optim::Optimizer& optimizer) {
      return any_gradient(optimizer, f);
    });
  });
  const auto for_each_new_gradient = [&](const auto& function) {
    for (torch::optim::Optimizer& optimizer : work_.optimizers) {
      any_parameter(optimizer, [&](const at::Tensor& parameter) {
        const at::Tensor& gradient = gradient_of(parameter);
        if (!before.contains(gradient)) function(parameter, gradient);
        return false;
      });
    }
  };
  for (const auto& state : states_) recorder_->run([&] { state->settle(); });
  const GradientList left = before_;
  // After a failure the device has executed nothing of the body: its gradients have no values, and
  // its step was not taken. Only the device has this fact, so a possible step is recorded.
  auto forget = c10::make_scope_exit([&] {
    work_.outputs = {};
    for_each_new_gradient(
        [](const at::Tensor& parameter, const at::Tensor&) { parameter.mutable_grad().reset(); });
    for (torch::optim::Optimizer& optimizer : work_.optimizers) {
      auto* const step = dynamic_cast<CapturedStep*>(&optimizer);
      if (step && call.steps) step->note_replayed_step();
    }
    if (call.in_window) left.attach();
    if (call.undo) call.undo();
  });
  const std::string failure = record();
  if (!failure.empty()) return refuse(failure);
  if (eager_) return;
  forget.release();
  captured_ = true;
  if (call.in_window) after_ = GradientList(work_);
  if (micro_batch_ == 0) before_ = GradientList();  // the body has cleared them
  for_each_new_gradient([&](const at::Tensor& parameter, const at::Tensor& gradient) {
    if (gradient.defined()) gradients_.emplace_back(parameter, gradient);
  });
}

/// Why the capture failed; empty if it did not.
inline std::string CapturedIteration::record() {
  const auto trace = std::make_shared<BodyTrace>(recorder_->device_type());
  try {
    recorder_->record([this, trace] {  // kept by recorders that do the work again
      const Observation observation("CudaGraph", trace, Watched::ops);
      call_body(/*in_capture=*/true);
    });
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = c10::str(
        "CudaGraph: there is not enough memory to capture the iteration, though it ran eagerly ",
        warmed_up_,
        " times: a graph has its own memory. Free some, or use a smaller batch and call reset(). "
        "The error was: ",
        error.what_without_backtrace());
    TORCH_CHECK_WITH(OutOfMemoryError, work_.when_possible, text);
    return text;
  } catch (const c10::Error& error) {
    return c10::str("CudaGraph: the iteration cannot be captured, though it ran eagerly ",
                    warmed_up_,
                    " times. The usual reason is an autograd graph of an earlier eager step that "
                    "is still alive: let go of its loss. The error was: ",
                    error.what_without_backtrace());
  } catch (const std::exception& error) {
    if (!work_.when_possible) throw;
    return c10::str("CudaGraph: the function threw while it was captured: ", error.what());
  }
  outer_memory_ = trace->outer_memory();
  compare_with_warm_up(*trace);
  return {};
}

}  // namespace TORCHAMP_NAMESPACE::detail
