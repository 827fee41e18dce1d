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

/// The result of an Accumulation's step: a StepResult, and the numbers of micro-batches. A query
/// synchronises once, unless the host already has the value.
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
/// The step uses the gradient of the mean of the losses. A window is the micro-batches of one step.
/// Without `.drop_bad`, all losses of a window have the same scale, and `.grad` holds the sums of
/// their gradients. If the scale has changed in a window, or if the gradients were cleared (set to
/// none, as zero_grad() does), backward() and flush() throw. They also throw if the program has
/// called the scaler's unscale_() or step() itself. After such an error discard() begins a new
/// window. The scaler cannot be saved in a window. Scaler and optimizer must outlive this object.
/// Synchronises only if scaler.step() does. One thread at a time.
///
/// If the optimizer's step or one of the two callbacks below throws, either call flush(), which
/// tries the step again, or call discard(), which drops the window. If LibTorch's backward throws,
/// it may have added some of the gradients: call discard(). With `.drop_bad` this is not needed,
/// because such a micro-batch is not part of the window.
///
/// With `.drop_bad`, the gradients of each micro-batch are unscaled and checked separately, and
/// then added to sums outside `.grad`. Each micro-batch is an iteration of the scaler: the scale
/// may change in a window, and growth_interval counts micro-batches. The device decides which
/// micro-batches to keep; with a disabled scaler all are kept. If the sum of the kept micro-batches
/// is not finite, all are dropped. The host does not know which micro-batches were dropped. So a
/// step also steps a parameter whose gradients came only from dropped micro-batches: its gradient
/// is 0 then, and momentum and weight decay apply.
///
/// `.drop_bad` needs memory for one fp32 sum of each parameter's size (fp64 for fp64 parameters).
/// It costs one synchronisation in the step, unless the optimizer is a ScaledStep. Gradients must
/// be dense. In a window, parameters may be added to the optimizer but not removed or reshaped. The
/// sums are divided by the number of kept micro-batches, not by `micro_batches`. So a program may
/// pass a large `micro_batches` and end each window by flush().
class Accumulation {
 public:
  /// Steps `optimizer` once per `micro_batches` calls of backward(); dropped micro-batches count.
  /// Error: `micro_batches` below 1.
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

  /// Sets a function that is called before the gradients are unscaled: call
  /// MasterWeights::take_gradients() in it. Without `.drop_bad` it is called once per step, with
  /// the sums of all gradients of the window, still scaled. With `.drop_bad` it is called after
  /// each backward(), with the scaled gradients of one micro-batch.
  ///
  /// With MasterWeights and without `.drop_bad`, backward() itself moves the gradients of all
  /// micro-batches but the last to the masters, which add them in fp32. Exception: gradients under
  /// DistributedDataParallel::no_sync() stay in the model until the step.
  void before_unscale(std::function<void()> call) { before_unscale_ = std::move(call); }

  /// Sets a function that is called before each step with the complete, unscaled gradients: clip
  /// them in it. MasterWeights::take_gradients() is an error here.
  void before_step(std::function<void()> call) { before_step_ = std::move(call); }

  /// Adds the gradients of `loss`. The last micro-batch of a window also steps, calls update(),
  /// clears the gradients, and returns the result. Errors, before anything is changed: a loss that
  /// is already scaled or does not require grad; a window whose step has failed; gradients that
  /// were cleared since the last call, or that the scaler has unscaled or stepped with.
  ///
  /// With `.drop_bad`, each call clears the gradients at its start and at its end. At its start it
  /// also clears the gradients of a model under MasterWeights. If update() throws at a limit of the
  /// scaler, the micro-batch is not counted and the scaler is unchanged.
  std::optional<AccumulationResult> backward(const at::Tensor& loss);

  /// Steps with an incomplete window, at the end of an epoch. Without `.drop_bad`, the sum of its
  /// losses is still divided by `micro_batches`. Does nothing if no micro-batch is pending. After
  /// an error of the step, flush() tries the step again. If update() throws at a limit of the
  /// scaler, the step was skipped and the window is dropped.
  ///
  /// If gradients were computed under ShardedMasterWeights::no_sync(), flush() sends them, so all
  /// processes must call it. It does not send gradients in DistributedDataParallel::no_sync(): call
  /// sync_gradients() in before_unscale(). With `.drop_bad`, a clip outside of before_step() finds
  /// no gradients. If the program has clipped in this way in the window, and before_step() is not
  /// set, the step throws.
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

#if TORCHAMP_BODIES
#include "torchamp/detail/extras/accumulation/accumulation-inl.h"  // IWYU pragma: export
#endif
