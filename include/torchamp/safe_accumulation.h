// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief SafeAccumulation: one step for several micro-batches, without the bad ones.

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/accumulation/accumulation.h"
#include "torchamp/detail/extras/accumulation/sum.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// The result of a SafeAccumulation's step. Queries read the device once at most, as StepResult's
/// do.
class SafeAccumulationResult {
 public:
  /// False if every micro-batch was dropped, or the mean of the kept ones is not finite.
  bool stepped() const { return kept_->read() > 0.; }
  /// As stepped().
  explicit operator bool() const { return stepped(); }
  /// Number of micro-batches in the step.
  int64_t kept() const { return static_cast<int64_t>(kept_->read()); }
  /// Number of micro-batches whose gradients held an inf or a NaN, or that gave none.
  int64_t dropped() const { return micro_batches_ - kept(); }
  /// Number of all micro-batches. Never reads.
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
///     torchamp::SafeAccumulation accumulation(scaler, optimizer);
///     for (auto& micro_batch : window) accumulation.backward(loss_of(micro_batch));
///     auto result = accumulation.step();
///
/// Each micro-batch is unscaled and checked by itself, added to sums outside `.grad`, and ends an
/// iteration of the scaler: the scale may change within a window, and growth_interval counts
/// micro-batches. The device decides whether to keep one (with a disabled scaler, all are kept).
/// One that gives no parameter of the optimizer a gradient is dropped. The step uses the mean of
/// the kept ones; if their sum is not finite, all are dropped. Costs one fp32 sum per parameter
/// (fp64 for fp64 parameters), and one read in step() unless the optimizer is a ScaledStep.
/// Gradients must be dense. Within a window the scaler cannot be saved, and parameters may be added
/// to the optimizer but not removed or reshaped. Holds references to scaler and optimizer. One
/// thread at a time.
///
/// A call that fails leaves the window unchanged.
class SafeAccumulation {
 public:
  /// Steps `optimizer` with what step() finds added up.
  SafeAccumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer)
      : scaler_(scaler),
        optimizer_(optimizer),
        window_(std::make_shared<detail::AccumulationWindow>()) {}

  SafeAccumulation(const SafeAccumulation&) = delete;
  SafeAccumulation& operator=(const SafeAccumulation&) = delete;
  SafeAccumulation(SafeAccumulation&&) = default;
  SafeAccumulation& operator=(SafeAccumulation&&) = delete;
  /// Warns if a window is open: call step() or discard() first.
  ~SafeAccumulation() {
    if (!window_ || window_->pending == 0) return;
    detail::warn("SafeAccumulation: destroyed with ", window_->pending,
                 " micro-batch(es) pending. Call step() or discard() first.");
  }

  /// Called after each backward() with the gradients, still scaled, where it has put them: call
  /// MasterWeights::take_gradients() here.
  void before_unscale(std::function<void()> call) { before_unscale_ = std::move(call); }

  /// Computes the gradients of `loss` and adds them, unless one holds an inf or a NaN. Clears the
  /// parameters' gradients before and after; before, also those of a model under MasterWeights. If
  /// update() throws, at a limit of the scaler, the micro-batch is not counted and the scaler
  /// unchanged.
  void backward(const at::Tensor& loss) {
    check_ready("backward");
    detail::check_not_scaled_within(loss, "SafeAccumulation::backward",
                                    detail::ScalerParts::ledger(scaler_).scaled,
                                    detail::ScalerParts::ledger(scaler_).order);
    warn_of_others("backward");
    detail::clear_gradients(optimizer_);
    detail::drop_model_gradients(optimizer_);  // left by an exception
    is_clear_ = false;
    scaler_.scale(loss).backward();
    if (const auto unsent = detail::unsent_of(optimizer_); unsent && unsent->any()) {
      unsent->drop();
      TORCH_CHECK(false,
                  "SafeAccumulation::backward: the gradients of this micro-batch were computed "
                  "within no_sync() and not sent, so the processes cannot decide whether to keep "
                  "them. Leave no_sync() out.");
    }
    if (before_unscale_) before_unscale_();
    detail::warn_of_local_gradients(optimizer_, "SafeAccumulation", warned_of_local_);
    sum_.check(optimizer_);
    try {
      scaler_.unscale_(optimizer_);
      const auto add = sum_.prepared(optimizer_, scaler_.found_inf(optimizer_));
      scaler_.update();  // before the sums change, since it may throw
      add();
    } catch (...) {
      scaler_.discard(optimizer_);
      throw;
    }
    if (++window_->pending == 1) {
      detail::note_open(detail::ScalerParts::ledger(scaler_), window_, optimizer_);
      began_at_ = detail::PlainClips::tick();
    }
    detail::clear_gradients(optimizer_);
    is_clear_ = true;
  }

  /// Steps with the mean of the kept gradients and begins a new window; skips the step if none was
  /// kept. `before_step` is called when the parameters' gradients hold that mean, unscaled: clip
  /// them here, with or without naming the scaler. Error, without a `before_step`: a clip since the
  /// window's first micro-batch, which found no gradients. After an exception from `before_step` or
  /// the optimizer's step the window is unchanged, and step() may be called again.
  SafeAccumulationResult step(const std::function<void()>& before_step = nullptr) {
    TORCH_CHECK(window_->pending > 0,
                "SafeAccumulation::step: there is no micro-batch. Call backward(loss) first.");
    check_ready("step");
    TORCH_CHECK(before_step || !detail::PlainClips::any_in_vain_since(began_at_, optimizer_, false),
                "SafeAccumulation::step: a clip before this call found no gradients, since the "
                "sums are kept outside .grad. Clip in a function passed to step(): step([&] { "
                "clip_grad_norm_(optimizer, 1.); }).");
    warn_of_others("step");
    detail::clear_gradients(optimizer_);  // a step that has failed may have left its own
    is_clear_ = false;
    auto kept = std::make_shared<detail::ReadOnce<double>>(sum_.kept());
    at::Tensor skipped;  // memory for what comes after the step, where nothing may fail
    if (kept->tensor.defined()) skipped = at::empty_like(kept->tensor);
    at::Tensor flag = sum_.give_mean_to(optimizer_, *kept);
    if (scaler_.is_enabled()) {
      detail::take_unscaled(detail::ScalerParts::ledger(scaler_), optimizer_, std::move(flag),
                            sum_.any());
    }
    try {
      if (before_step) before_step();
      if (scaler_.is_enabled() || sum_.any()) {
        const at::Tensor found_inf = scaler_.step(optimizer_).found_inf();
        const detail::InternalOps guard;
        if (skipped.defined()) {
          at::clamp_max_out(skipped, found_inf, 1.);
          kept->tensor.addcmul_(kept->tensor, skipped, -1.);
        }
      }
    } catch (...) {
      scaler_.discard(optimizer_);
      throw;
    }
    const int64_t micro_batches = window_->pending;
    clear();
    return {std::move(kept), micro_batches};
  }

  /// Drops the sums, clears the parameters' gradients and those of a model under MasterWeights, and
  /// begins a new window.
  void discard() {
    clear();
    detail::drop_model_gradients(optimizer_);
  }

  /// Micro-batches since the last step, including dropped ones.
  int64_t pending() const { return window_->pending; }

 private:
  void warn_of_others(const char* call) {
    if (!is_clear_ || warned_ || !detail::any_gradient(optimizer_)) return;
    warned_ = true;
    TORCH_WARN("SafeAccumulation::", call,
               ": the parameters have gradients that do not come from backward() of this "
               "accumulation; they are dropped. Call accumulation.backward(loss) for every loss. "
               "(To drop gradients on purpose, call zero_grad().) This warning is given once.");
  }
  void clear() {
    detail::clear_gradients(optimizer_);
    is_clear_ = true;
    scaler_.discard(optimizer_);
    sum_.clear();
    window_->pending = 0;
  }
  void check_ready(const char* call) const {
    TORCH_CHECK(!scaler_.is_unscaled(optimizer_) && !scaler_.is_stepped(optimizer_),
                "SafeAccumulation::", call,
                ": the program has unscaled the gradients of this optimizer, or stepped with them, "
                "in this iteration. Leave unscale_, step and update to the accumulation, or call "
                "update() before.");
  }

  GradScaler& scaler_;
  torch::optim::Optimizer& optimizer_;
  detail::GradientSum sum_;
  std::shared_ptr<detail::AccumulationWindow> window_;  // the scaler looks at it
  std::function<void()> before_unscale_;
  uint64_t began_at_ = 0;  // the window
  bool is_clear_ = false;  // the gradients were, when the last call returned
  bool warned_ = false, warned_of_local_ = false;
};

}  // namespace TORCHAMP_NAMESPACE
