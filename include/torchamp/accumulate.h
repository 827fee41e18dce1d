// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Accumulation and SafeAccumulation: one step with the gradients of several micro-batches.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/scaler/read_once.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/accumulation/accumulation.h"
#include "torchamp/detail/extras/accumulation/sum.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// Gradient accumulation: one step of `optimizer` with the gradients of `micro_batches` losses.
///
///     torchamp::Accumulation accumulation(scaler, optimizer, 4);
///     for (auto& batch : *loader) {
///       auto result = accumulation.backward(loss_of(batch));   // every fourth call steps
///       if (result && result->stepped()) schedule.step();
///     }
///     accumulation.flush();
///
/// The step uses the gradient of the mean of the losses. All losses of a window have the same
/// scale. Errors: the scale has changed within a window, the gradients were cleared (set to none,
/// as by zero_grad()), or the program has called the scaler's step() and update() itself; discard()
/// then begins a new window. One bad micro-batch makes the scaler skip the whole step; see
/// SafeAccumulation. The scaler cannot be saved within a window. Holds references to scaler and
/// optimizer. Synchronises only where scaler.step() does. One thread at a time.
///
/// After an exception from LibTorch's backward, which may have added some of the gradients, only
/// discard() remains. After one from the two callbacks below or the optimizer's step, flush() steps
/// again with the window, or discard() drops it.
class Accumulation {
 public:
  /// Steps `optimizer` once per `micro_batches` calls of backward(). Error: fewer than 1.
  Accumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer, int64_t micro_batches)
      : scaler_(scaler),
        optimizer_(optimizer),
        micro_batches_(micro_batches),
        window_(std::make_shared<detail::AccumulationWindow>()) {
    TORCH_CHECK_VALUE(micro_batches >= 1, "Accumulation: micro_batches is ", micro_batches,
                      ". It is 1 or more.");
  }

  Accumulation(const Accumulation&) = delete;
  Accumulation& operator=(const Accumulation&) = delete;
  Accumulation(Accumulation&&) = default;
  Accumulation& operator=(Accumulation&&) = delete;
  /// Warns if a window is open: call flush() or discard() first.
  ~Accumulation();

  /// Called before each step with the gradients of the whole window, still scaled, where backward()
  /// has put them: call MasterWeights::take_gradients() here.
  void before_unscale(std::function<void()> call) { before_unscale_ = std::move(call); }

  /// Called before each step with the complete, unscaled gradients: clip them here. Not the place
  /// for MasterWeights::take_gradients(), which is an error.
  void before_step(std::function<void()> call) { before_step_ = std::move(call); }

  /// Adds the gradients of `loss`. The last micro-batch of a window also steps, calls update(),
  /// clears the gradients, and returns the result. Errors, before anything is changed: a loss that
  /// is scaled already or does not require grad; a window whose step has failed, or whose gradients
  /// have been cleared since the last call, or unscaled or stepped with by the scaler.
  std::optional<StepResult> backward(const at::Tensor& loss);

  /// Steps with an incomplete window, at the end of an epoch; the sum of its losses is still
  /// divided by `micro_batches`. Does nothing if none is pending. Sends gradients that were
  /// computed within ShardedMasterWeights::no_sync(), for which all processes call it; for those of
  /// a DistributedDataParallel, call its sync_gradients() in before_unscale(). After an error of
  /// the step, tries it again. If update() throws, at a limit of the scaler, the step was skipped
  /// and the window is dropped.
  std::optional<StepResult> flush();

  /// Clears the gradients of an incomplete window, or of one whose step has failed, and begins a
  /// new one; also those of a model under MasterWeights, and those that ShardedMasterWeights have
  /// not sent.
  void discard();

  /// Micro-batches since the last step.
  int64_t pending() const { return window_->pending; }

  /// For the library's own headers: what messages name.
  void speak_in(const detail::AccumulationTerms& terms) { terms_ = terms; }
  /// For the library's own headers: a graph's replay has done what backward() does on the device.
  void note_replayed_backward();
  /// For the library's own headers: the gradients of a window, at some time.
  struct Look {
    bool is_open;           ///< whether the window was
    bool is_as_left;        ///< whether the gradients were as the last backward() has left them
    uint64_t times_scaled;  ///< how often the scaler had scaled
    detail::Snapshot gradients;
  };
  /// For the library's own headers: how they are now.
  Look look() const;
  /// For the library's own headers: whether the program has changed them since.
  bool has_changed(const Look& before) const;
  /// For the library's own headers: what the program has added to them since belongs to the window,
  /// if it may be scaled: the scaler has scaled something since, or was asked for the scale.
  void accept_scaled(const Look& before);
  /// For the library's own headers: calling the result goes back to now, where what was added since
  /// is no longer among the gradients.
  std::function<void()> bookmark();

 private:
  enum class Stage {
    open,      ///< between two calls
    adding,    ///< in backward(), or after its exception
    stepping,  ///< in flush(), or after its exception
  };

  int64_t version_of_scale() const;
  void open_window();
  void note_gradients();
  void clear();

  void check_whole(const char* call) const;
  /// Checks that gradients may be added.
  void check_open() const;
  void check_window(const char* call) const;

  bool is_as_left() const;
  void warn_of_writes();

  GradScaler& scaler_;
  torch::optim::Optimizer& optimizer_;
  int64_t micro_batches_;
  detail::AccumulationTerms terms_;
  std::shared_ptr<detail::AccumulationWindow> window_;  // the scaler looks at it
  Stage stage_ = Stage::open;
  int64_t version_ = 0;        // of the scale, at the start of the window
  std::size_t gradients_ = 0;  // after the last backward()
  detail::Snapshot snapshot_;  // theirs
  uint64_t taken_ = 0;         // by masters until then
  bool warned_ = false, warned_of_local_ = false;
  std::function<void()> before_unscale_, before_step_;
};

/// The result of a SafeAccumulation's step. Its queries synchronise at most once, like those of a
/// StepResult.
class SafeAccumulationResult {
 public:
  /// False if every micro-batch was dropped, or the mean of the kept ones is not finite.
  bool stepped() const { return kept_->read() > 0.; }
  /// Like stepped().
  explicit operator bool() const { return stepped(); }
  /// Number of micro-batches in the step.
  int64_t kept() const { return static_cast<int64_t>(kept_->read()); }
  /// Number of micro-batches whose gradients held an inf or a NaN, or that gave none.
  int64_t dropped() const { return micro_batches_ - kept(); }
  /// Number of all micro-batches. Never synchronises.
  int64_t micro_batches() const { return micro_batches_; }

 private:
  friend class SafeAccumulation;
  SafeAccumulationResult(std::shared_ptr<detail::ReadOnce<double>> kept, int64_t micro_batches)
      : kept_(std::move(kept)), micro_batches_(micro_batches) {}

  std::shared_ptr<detail::ReadOnce<double>> kept_;
  int64_t micro_batches_;
};

/// Gradient accumulation that drops, and counts, micro-batches whose gradients hold an inf or a
/// NaN, and keeps the others of the window.
///
///     torchamp::SafeAccumulation accumulation(scaler, optimizer, 4);
///     for (auto& batch : *loader) {
///       auto result = accumulation.backward(loss_of(batch));   // every fourth call steps
///       if (result && result->stepped()) schedule.step();
///     }
///     accumulation.flush();
///
/// It has the calls of an Accumulation. Without a number of micro-batches, step() ends a window.
///
/// Each micro-batch is unscaled and checked by itself, added to sums outside `.grad`, and ends an
/// iteration of the scaler: the scale may change within a window, and growth_interval counts
/// micro-batches. The device decides whether to keep one; with a disabled scaler, all are kept.
/// One that gives no parameter of the optimizer a gradient is dropped. The step uses the mean of
/// the kept ones; if their sum is not finite, all are dropped. A parameter that only dropped ones
/// have reached is stepped with a gradient of 0, so its momentum and weight decay go on: the host
/// does not know which were dropped. Costs one fp32 sum per parameter (fp64 for fp64 parameters),
/// and one synchronisation in the step unless the optimizer is a ScaledStep.
/// Gradients must be dense. Within a window the scaler cannot be saved, and parameters may be added
/// to the optimizer but not removed or reshaped. Holds references to scaler and optimizer. One
/// thread at a time.
///
/// A call that fails leaves the window unchanged. If it is the step in the last backward() of a
/// window that fails, flush() tries it again and discard() drops the window.
class SafeAccumulation {
 public:
  /// Steps `optimizer` when the program calls step().
  SafeAccumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer)
      : scaler_(scaler),
        optimizer_(optimizer),
        window_(std::make_shared<detail::AccumulationWindow>()) {}

  /// Steps `optimizer` once per `micro_batches` calls of backward(), dropped ones included. Error:
  /// fewer than 1.
  SafeAccumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer, int64_t micro_batches)
      : SafeAccumulation(scaler, optimizer) {
    TORCH_CHECK_VALUE(micro_batches >= 1, "SafeAccumulation: micro_batches is ", micro_batches,
                      ". It is 1 or more.");
    micro_batches_ = micro_batches;
  }

  SafeAccumulation(const SafeAccumulation&) = delete;
  SafeAccumulation& operator=(const SafeAccumulation&) = delete;
  SafeAccumulation(SafeAccumulation&&) = default;
  SafeAccumulation& operator=(SafeAccumulation&&) = delete;
  /// Warns if a window is open: call flush() or discard() first.
  ~SafeAccumulation();

  /// Called after each backward() with the gradients, still scaled, where it has put them: call
  /// MasterWeights::take_gradients() here.
  void before_unscale(std::function<void()> call) { before_unscale_ = std::move(call); }

  /// Called before each step, when the parameters' gradients hold the mean of the kept ones,
  /// unscaled: clip them here, with or without naming the scaler.
  void before_step(std::function<void()> call) { before_step_ = std::move(call); }

  /// Computes the gradients of `loss` and adds them, unless one holds an inf or a NaN. The last
  /// micro-batch of a window also steps, and returns the result. Clears the parameters' gradients
  /// before and after; before, also those of a model under MasterWeights. If update() throws, at a
  /// limit of the scaler, the micro-batch is not counted and the scaler is unchanged.
  std::optional<SafeAccumulationResult> backward(const at::Tensor& loss);

  /// Steps with an incomplete window, at the end of an epoch. Does nothing if none is pending.
  std::optional<SafeAccumulationResult> flush();

  /// Steps with the mean of the kept gradients and begins a new window; skips the step if none was
  /// kept. Error: no micro-batch is pending. A `before_step` that is passed here is called in place
  /// of the one that was set. Error, without either: a clip since the window's first micro-batch,
  /// which found no gradients. After an exception from it or from the optimizer's step the window
  /// is unchanged, and step() may be called again.
  SafeAccumulationResult step(const std::function<void()>& before_step = nullptr);

  /// Drops the sums, clears the parameters' gradients and those of a model under MasterWeights, and
  /// begins a new window.
  void discard();

  /// Micro-batches since the last step, including dropped ones.
  int64_t pending() const { return window_->pending; }

 private:
  void warn_of_others(const char* call);
  void clear();
  void check_ready(const char* call) const;

  GradScaler& scaler_;
  torch::optim::Optimizer& optimizer_;
  detail::GradientSum sum_;
  std::shared_ptr<detail::AccumulationWindow> window_;  // the scaler looks at it
  std::function<void()> before_unscale_, before_step_;
  int64_t micro_batches_ = 0;  // of a window; 0: the program ends it
  uint64_t began_at_ = 0;      // the window
  bool is_clear_ = false;      // the gradients were, when the last call returned
  bool warned_ = false, warned_of_local_ = false;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/extras/accumulation/accumulation-inl.h"       // IWYU pragma: export
#include "torchamp/detail/extras/accumulation/safe_accumulation-inl.h"  // IWYU pragma: export
