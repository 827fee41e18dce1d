// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. Accumulation: one step with the gradients of several micro-batches.

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

/// Options of an Accumulation.
struct AccumulationOptions {
  /// True: a micro-batch is dropped and counted if its gradients hold an inf or a NaN, or if it has
  /// no gradients; the step uses the mean of the other micro-batches. False: one bad micro-batch
  /// makes the scaler skip the whole step.
  bool drop_bad = false;
};

/// The result of an Accumulation's step: a StepResult, and the numbers of micro-batches. Each kind
/// of query synchronises at most once.
class AccumulationResult : public StepResult {
 public:
  /// Whether the optimizer stepped. With `.drop_bad`, false means: every micro-batch was dropped,
  /// or the mean of the kept micro-batches is not finite.
  bool stepped() const { return kept() > 0; }
  /// Like stepped().
  explicit operator bool() const { return stepped(); }
  /// Number of micro-batches in the step; 0 if it was skipped.
  int64_t kept() const {
    if (kept_) return static_cast<int64_t>(kept_->read());
    return StepResult::stepped() ? micro_batches_ : 0;
  }
  /// Number of micro-batches that are not in the step.
  int64_t dropped() const { return micro_batches_ - kept(); }
  /// Number of all micro-batches. Never synchronises.
  int64_t micro_batches() const { return micro_batches_; }

 private:
  friend class Accumulation;
  AccumulationResult(StepResult step, int64_t micro_batches,
                     std::shared_ptr<detail::ReadOnce> kept = nullptr)
      : StepResult(std::move(step)), kept_(std::move(kept)), micro_batches_(micro_batches) {}

  std::shared_ptr<detail::ReadOnce> kept_;  // null without drop_bad
  int64_t micro_batches_;
};

/// Gradient accumulation: one step of `optimizer` with the gradients of `micro_batches` losses.
///
///     torchamp::Accumulation accumulation(scaler, optimizer, 4);
///     for (auto& batch : *loader) {
///       auto result = accumulation.backward(loss_of(batch));   // every fourth call steps
///       if (result && result->stepped()) schedule.step();
///     }
///     accumulation.flush();
///
/// The step uses the gradient of the mean of the losses. A window is the micro-batches of one step;
/// all its losses have the same scale. Errors: the scale has changed in a window; the gradients
/// were cleared (set to none, as zero_grad() does); the program has called the scaler's step() and
/// update() itself. After such an error discard() begins a new window. The scaler cannot be saved
/// in a window. Holds references to scaler and optimizer. Synchronises only if scaler.step()
/// does. One thread at a time.
///
/// If LibTorch's backward throws, it may have added some of the gradients: call discard(). If one
/// of the two callbacks below or the optimizer's step throws, either call flush(), which tries the
/// step again, or call discard(), which drops the window.
///
/// With `.drop_bad` each micro-batch is unscaled and checked separately, and then added to sums
/// outside `.grad`. Each micro-batch is an iteration of the scaler: the scale may change in a
/// window, and growth_interval counts micro-batches. The device decides which micro-batches to
/// keep; with a disabled scaler all are kept. If the sum of the kept micro-batches is not finite,
/// all are dropped. The host does not know which micro-batches were dropped. So a parameter that
/// only dropped micro-batches have reached is stepped with a gradient of 0: its momentum and weight
/// decay continue.
///
/// `.drop_bad` costs one fp32 sum per parameter (fp64 for fp64 parameters), and one synchronisation
/// in the step unless the optimizer is a ScaledStep. Gradients must be dense. In a window,
/// parameters may be added to the optimizer but not removed or reshaped. A call that fails leaves
/// the window unchanged. The mean is over the kept micro-batches. So a program that ends windows by
/// flush() may pass a number of `micro_batches` that no window reaches.
class Accumulation {
 public:
  /// Steps `optimizer` once per `micro_batches` calls of backward(); dropped micro-batches count.
  /// Error: fewer than 1.
  Accumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer, int64_t micro_batches,
               AccumulationOptions options = {})
      : scaler_(scaler),
        optimizer_(optimizer),
        micro_batches_(micro_batches),
        window_(std::make_shared<detail::AccumulationWindow>()) {
    TORCH_CHECK_VALUE(micro_batches >= 1, "Accumulation: micro_batches is ", micro_batches,
                      ". It must be 1 or more.");
    if (options.drop_bad) sum_.emplace();
  }

  Accumulation(const Accumulation&) = delete;
  Accumulation& operator=(const Accumulation&) = delete;
  Accumulation(Accumulation&&) = default;
  Accumulation& operator=(Accumulation&&) = delete;
  /// Warns if a window is open: call flush() or discard() first.
  ~Accumulation();

  /// Sets a function that is called before the gradients are unscaled, once per step: call
  /// MasterWeights::take_gradients() in it. The gradients are then the sums of all backward() calls
  /// of the window, still scaled. With `.drop_bad` it is called after each backward(), with the
  /// gradients of the micro-batch. Gradients of earlier micro-batches are already in the masters,
  /// which add them in fp32. Exception: gradients under DistributedDataParallel::no_sync() are
  /// still in the model.
  void before_unscale(std::function<void()> call) { before_unscale_ = std::move(call); }

  /// Sets a function that is called before each step with the complete, unscaled gradients: clip
  /// them in it. MasterWeights::take_gradients() is an error here.
  void before_step(std::function<void()> call) { before_step_ = std::move(call); }

  /// Adds the gradients of `loss`. The last micro-batch of a window also steps, calls update(),
  /// clears the gradients, and returns the result. Errors, before anything is changed: a loss that
  /// is already scaled or does not require grad; a window whose step has failed; gradients that
  /// were cleared since the last call, or that the scaler has unscaled or stepped with.
  ///
  /// With `.drop_bad` the gradients are cleared before and after each call; before the call, the
  /// gradients of a model under MasterWeights are also cleared. If update() throws at a limit of
  /// the scaler, the micro-batch is not counted and the scaler is unchanged.
  std::optional<AccumulationResult> backward(const at::Tensor& loss);

  /// Steps with an incomplete window, at the end of an epoch. Without `.drop_bad`, the sum of its
  /// losses is still divided by `micro_batches`. Does nothing if no micro-batch is pending. After
  /// an error of the step, flush() tries the step again. If update() throws at a limit of the
  /// scaler, the step was skipped and the window is dropped.
  ///
  /// Sends gradients that were computed under ShardedMasterWeights::no_sync(); then all processes
  /// must call it. Gradients in DistributedDataParallel::no_sync() are not sent: call
  /// sync_gradients() in before_unscale(). Error with `.drop_bad` and without a before_step(): the
  /// program has clipped since the window's first micro-batch, when there were no gradients.
  std::optional<AccumulationResult> flush();

  /// Drops an incomplete window, or a window whose step has failed, and begins a new window. Clears
  /// the optimizer's gradients, the gradients of a model under MasterWeights, and gradients that
  /// ShardedMasterWeights have not sent.
  void discard();

  /// Micro-batches since the last step, including dropped micro-batches.
  int64_t pending() const { return window_->pending; }

  /// For the library's own headers: the terms in messages.
  void set_terms(const detail::AccumulationTerms& terms) { terms_ = terms; }
  /// For the library's own headers: records that a graph's replay has done the work of backward()
  /// on the device.
  void note_replayed_backward();
  /// For the library's own headers: the state of a window's gradients at some time.
  struct Look {
    bool is_open;           ///< whether the window was open
    bool is_unchanged;      ///< whether the gradients were unchanged since the last backward()
    uint64_t times_scaled;  ///< how often the scaler had scaled a loss
    detail::Snapshot gradients;
  };
  /// For the library's own headers: the present state.
  Look look() const;
  /// For the library's own headers: whether the program has changed the gradients since `before`.
  bool has_changed(const Look& before) const;
  /// For the library's own headers: accepts into the window the gradients that the program has
  /// added since `before`, if they may be scaled: the scaler has scaled a loss or returned its
  /// scale since.
  void accept_scaled(const Look& before);
  /// For the library's own headers: returns a function that restores the present state of the
  /// window, after the gradients that were added since have been removed.
  std::function<void()> bookmark();

 private:
  enum class Stage {
    open,      ///< between two calls
    adding,    ///< in backward(), or after its exception
    stepping,  ///< in flush(), or after its exception
  };

  int64_t version_of_scale() const;
  void add_in_place(const at::Tensor& scaled);
  void add_apart(const at::Tensor& scaled);
  AccumulationResult step_with_mean();
  void open_window();
  void note_gradients();
  void clear();

  void check_whole(const char* call) const;
  /// Checks that gradients may be added.
  void check_open() const;
  void check_scaled(const char* call) const;
  void check_window(const char* call) const;

  bool is_unchanged() const;
  void warn_of_writes();
  void warn_of_others(const char* call);

  GradScaler& scaler_;
  torch::optim::Optimizer& optimizer_;
  int64_t micro_batches_;
  std::optional<detail::GradientSum> sum_;  // with drop_bad
  detail::AccumulationTerms terms_;
  std::shared_ptr<detail::AccumulationWindow> window_;  // the scaler reads it
  Stage stage_ = Stage::open;
  int64_t version_ = 0;        // of the scale, at the start of the window
  std::size_t gradients_ = 0;  // after the last backward()
  detail::Snapshot snapshot_;  // of these gradients
  uint64_t taken_ = 0;         // gradients that masters had taken by then
  uint64_t noted_at_ = 0;      // the time of that backward(); with drop_bad, of a window's first
  bool is_clear_ = false;      // with drop_bad: no gradients when the last call returned
  bool warned_ = false, warned_of_local_ = false;
  std::function<void()> before_unscale_, before_step_;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/extras/accumulation/accumulation-inl.h"  // IWYU pragma: export
