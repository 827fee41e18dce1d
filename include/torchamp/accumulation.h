// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Accumulation: one step with the gradients of several micro-batches.

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/accumulation/accumulation.h"
#include "torchamp/detail/extras/shared/master_meta.h"
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
/// optimizer. Reads only what scaler.step() reads. One thread at a time.
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
  ~Accumulation() {
    if (!window_ || window_->pending == 0) return;
    detail::warn("Accumulation: destroyed with ", window_->pending, " of ", micro_batches_,
                 " micro-batches pending; later gradients will be added to theirs. First call "
                 "flush() to step with them, or discard() to drop them.");
  }

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
  std::optional<StepResult> backward(const at::Tensor& loss) {
    TORCH_CHECK_VALUE(loss.defined(), terms_.backward, ": the loss is undefined.");
    const detail::StepLedger& ledger = detail::ScalerParts::ledger(scaler_);
    ledger.scaled.check_not_in(loss, terms_.backward);
    detail::check_not_scaled_within(loss, terms_.backward, ledger.scaled, ledger.order);
    check_open();
    const at::Tensor part = [&] {
      const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
      return at::div(loss, static_cast<double>(micro_batches_));
    }();
    TORCH_CHECK_VALUE(part.numel() == 1 && part.requires_grad(), terms_.backward, ": the loss has ",
                      part.numel(), " element(s), and requires_grad is ", part.requires_grad(),
                      ". Pass one number that was computed from the parameters.");
    const at::Tensor scaled = scaler_.scale(part);
    if (window_->pending == 0) {
      version_ = version_of_scale();
      detail::note_open(detail::ScalerParts::ledger(scaler_), window_, optimizer_);
    } else {
      check_window(terms_.backward);
      warn_of_writes();
    }
    stage_ = Stage::adding;
    scaled.backward();
    stage_ = Stage::open;
    gradients_ = detail::count_gradients(optimizer_);
    versions_ = detail::versions_of_gradients(optimizer_);
    taken_ = detail::gradients_moved();
    added_at_ = detail::PlainClips::tick();
    if (++window_->pending < micro_batches_) return std::nullopt;
    return flush();
  }

  /// Steps with an incomplete window, at the end of an epoch: the sum of its losses is divided by
  /// `micro_batches`, too. Does nothing if none is pending. Sends gradients that were computed
  /// within ShardedMasterWeights::no_sync(), for which all processes call it; for those of a
  /// DistributedDataParallel, call its sync_gradients() in before_unscale(). After an error of the
  /// step, tries it again. (If update() throws, at a limit of the scaler, the step was skipped and
  /// the window is dropped.)
  std::optional<StepResult> flush() {
    check_whole(terms_.flush);
    if (window_->pending == 0) return std::nullopt;
    check_window(terms_.flush);
    stage_ = Stage::stepping;
    if (!scaler_.is_unscaled(optimizer_)) {
      const auto unsent = detail::unsent_of(optimizer_);
      if (unsent && unsent->any()) unsent->send();
      if (before_unscale_) before_unscale_();
      detail::warn_of_local_gradients(optimizer_, terms_.flush, warned_of_local_, terms_.send);
    }
    if (before_step_) {
      if (!scaler_.is_unscaled(optimizer_)) scaler_.unscale_(optimizer_);
      before_step_();
    }
    StepResult result = scaler_.step(optimizer_);
    clear();
    try {
      scaler_.update();
    } catch (...) {
      scaler_.discard(optimizer_);
      throw;
    }
    return result;
  }

  /// Clears the gradients of an incomplete window, or of one whose step has failed, and begins a
  /// new one; also those of a model under MasterWeights, and those that ShardedMasterWeights have
  /// not sent.
  void discard() {
    clear();
    detail::drop_model_gradients(optimizer_);
    scaler_.discard(optimizer_);
  }

  /// Micro-batches since the last step.
  int64_t pending() const { return window_->pending; }

  /// For the library's own headers: what messages name.
  void speak_in(const detail::AccumulationTerms& terms) { terms_ = terms; }

 private:
  enum class Stage {
    open,      ///< between two calls
    adding,    ///< in backward(), or after its exception
    stepping,  ///< in flush(), or after its exception
  };

  int64_t version_of_scale() const {
    const at::Tensor& scale = detail::ScalerParts::scale(scaler_).scale();
    return scale.defined() ? static_cast<int64_t>(scale._version()) : 0;
  }
  void clear() {
    detail::clear_gradients(optimizer_);
    window_->pending = 0;
    window_->was_used = false;
    stage_ = Stage::open;
    gradients_ = 0;
  }

  void check_whole(const char* call) const {
    TORCH_CHECK(stage_ != Stage::adding, call,
                ": backward() has failed, so the gradients may hold part of a micro-batch. ",
                terms_.drop);
  }
  /// Checks that gradients may be added.
  void check_open() const {
    check_whole(terms_.backward);
    TORCH_CHECK(stage_ == Stage::open, terms_.backward, ": the step with ", window_->pending,
                " of ", micro_batches_,
                " micro-batches has failed, so the window accepts no more. Call flush() to try the "
                "step again, or discard() to drop the window.");
    TORCH_CHECK(!scaler_.is_unscaled(optimizer_) && !scaler_.is_stepped(optimizer_),
                terms_.backward,
                ": the gradients of this optimizer have been unscaled or stepped with in this "
                "iteration; scaled ones cannot be added to them. Leave unscale_, step and update "
                "to ",
                terms_.owner, ". ", terms_.drop);
  }
  void check_window(const char* call) const {
    TORCH_CHECK(version_of_scale() == version_, call, ": the scale has changed after ",
                window_->pending, " of ", micro_batches_,
                " micro-batches, whose gradients have the old scale. Leave step and update to ",
                terms_.owner, ", and set the scale between two windows. ", terms_.drop);
    TORCH_CHECK(detail::count_gradients(optimizer_) >= gradients_, call, ": the gradients of ",
                window_->pending, " of ", micro_batches_,
                " micro-batches are gone. Leave out zero_grad(): ", terms_.owner,
                " clears them after its step. ", terms_.drop);
    TORCH_CHECK(!window_->was_used, call, ": the scaler has stepped with the gradients of ",
                window_->pending, " of ", micro_batches_,
                " micro-batches, or unscaled them, in an iteration that has ended. Leave step and "
                "update to ",
                terms_.owner, ". ", terms_.drop);
  }

  void warn_of_writes() {
    if (warned_ || taken_ != detail::gradients_moved() ||
        (versions_ == detail::versions_of_gradients(optimizer_) &&
         !detail::PlainClips::any_since(added_at_, optimizer_))) {
      return;
    }
    warned_ = true;
    TORCH_WARN(terms_.backward, ": the gradients of ", window_->pending, " of ", micro_batches_,
               " micro-batches were written to or replaced since the last call, as by a clip, "
               "zero_grad(false) or a backward() beside ",
               terms_.owner, ". Leave it out: ", terms_.owner, " clears gradients after its step. ",
               terms_.change, " This warning is given once.");
  }

  GradScaler& scaler_;
  torch::optim::Optimizer& optimizer_;
  int64_t micro_batches_;
  detail::AccumulationTerms terms_;
  std::shared_ptr<detail::AccumulationWindow> window_;  // the scaler looks at it
  Stage stage_ = Stage::open;
  int64_t version_ = 0;        // of the scale, at the start of the window
  std::size_t gradients_ = 0;  // after the last backward()
  uint64_t versions_ = 0;      // theirs
  uint64_t taken_ = 0;         // by masters until then
  uint64_t added_at_ = 0;      // the time of that
  bool warned_ = false, warned_of_local_ = false;
  std::function<void()> before_unscale_, before_step_;
};

}  // namespace TORCHAMP_NAMESPACE
