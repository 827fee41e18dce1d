// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief SafeAccumulation: several micro-batches make one step, bad ones are dropped.

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "torchamp/detail/gradients/accumulation.h"
#include "torchamp/detail/gradients/sum.h"
#include "torchamp/detail/host_values.h"
#include "torchamp/detail/masters/master_meta.h"
#include "torchamp/detail/scaler/step_ledger.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What came of a SafeAccumulation's step. Answers read the device once at most, as StepResult's
/// do.
class SafeAccumulationResult {
 public:
  /// False if every micro-batch was dropped, or the mean of those that were kept is not finite.
  bool stepped() const { return kept_->read() > 0.; }
  /// Whether the step was made: stepped().
  explicit operator bool() const { return stepped(); }
  /// Those that were stepped with.
  int64_t kept() const { return static_cast<int64_t>(kept_->read()); }
  /// Micro-batches whose gradients held an inf or a NaN, or that gave none.
  int64_t dropped() const { return micro_batches_ - kept(); }
  /// All that were given. Never reads.
  int64_t micro_batches() const { return micro_batches_; }

 private:
  friend class SafeAccumulation;
  SafeAccumulationResult(std::shared_ptr<detail::ReadOnce<double>> kept, int64_t micro_batches)
      : kept_(std::move(kept)), micro_batches_(micro_batches) {}

  std::shared_ptr<detail::ReadOnce<double>> kept_;
  int64_t micro_batches_;
};

/// Gradient accumulation in which a micro-batch whose gradients hold an inf or a NaN is dropped and
/// counted, and the rest of its window is kept.
///
///     torchamp::SafeAccumulation accumulation(scaler, optimizer);
///     for (auto& micro_batch : window) accumulation.backward(loss_of(micro_batch));
///     auto result = accumulation.step();
///
/// Each micro-batch is unscaled and checked by itself, added to sums apart from the parameters'
/// gradients, and ends an iteration of the scaler: the scale may change within a window, and
/// growth_interval counts micro-batches. Whether one is kept is decided on the device (with a
/// disabled scaler, all are). One that gives no parameter of the optimizer a gradient counts as
/// dropped. The step is made with the mean over those that were kept, unless their sum is not
/// finite: then all are dropped. Costs one fp32 sum for each parameter (fp64 for fp64 parameters),
/// and reads nothing except once in step() for an optimizer that is no ScaledStep. Gradients are
/// dense. Within a window, the scaler refuses to be saved, and parameters may join the optimizer
/// but not leave it or change their shape. Holds references to scaler and optimizer. One thread at
/// a time.
///
/// A call that fails leaves the window as it was.
class SafeAccumulation {
 public:
  /// Steps `optimizer` with what step() finds added up.
  SafeAccumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer)
      : scaler_(scaler), optimizer_(optimizer), window_(detail::open_window(optimizer)) {}

  SafeAccumulation(const SafeAccumulation&) = delete;
  SafeAccumulation& operator=(const SafeAccumulation&) = delete;
  SafeAccumulation(SafeAccumulation&&) = default;
  SafeAccumulation& operator=(SafeAccumulation&&) = delete;
  /// A warning where a window is open: call step() or discard() before.
  ~SafeAccumulation() {
    if (!window_ || window_->pending == 0) return;
    detail::warn(
        "SafeAccumulation: destroyed with ", window_->pending,
        " micro-batch(es), with which no step was made. Call step() before, or discard().");
  }

  /// Called after each backward(), with the gradients still scaled, wherever it has put them: the
  /// place for MasterWeights::take_gradients().
  void before_unscale(std::function<void()> call) { before_unscale_ = std::move(call); }

  /// Computes the gradients of `loss` and adds them, unless one holds an inf or a NaN. Clears the
  /// parameters' gradients before and after, and before, those of a model under MasterWeights. If
  /// update() throws, at a limit of the scaler, the micro-batch counts as never given, and the
  /// scaler as before it.
  void backward(const at::Tensor& loss) {
    check_ready("backward");
    detail::check_not_scaled_within(loss, "SafeAccumulation::backward",
                                    detail::ScalerParts::ledger(scaler_).scaled,
                                    detail::ScalerParts::ledger(scaler_).order);
    warn_of_others("backward");
    detail::clear_gradients(optimizer_);
    detail::drop_model_gradients(optimizer_);  // that an exception has left
    is_clear_ = false;
    scaler_.scale(loss).backward();
    if (const auto unsent = detail::unsent_of(optimizer_); unsent && unsent->any()) {
      unsent->drop();
      TORCH_CHECK(false,
                  "SafeAccumulation::backward: the gradients of this micro-batch were computed "
                  "within no_sync() and not sent, so that nobody can tell whether to keep them. "
                  "Leave no_sync() out.");
    }
    if (before_unscale_) before_unscale_();
    detail::warn_of_local_gradients(optimizer_, "SafeAccumulation", warned_of_local_);
    sum_.check(optimizer_);
    try {
      scaler_.unscale_(optimizer_);
      auto set = sum_.prepared(optimizer_, scaler_.found_inf(optimizer_));
      scaler_.update();  // before the sums are touched, for it may throw
      sum_.add(std::move(set));
    } catch (...) {
      scaler_.discard(optimizer_);
      throw;
    }
    if (++window_->pending == 1) {
      detail::ScalerParts::ledger(scaler_).windows.add(window_);
      began_at_ = detail::PlainClips::tick();
    }
    detail::clear_gradients(optimizer_);
    is_clear_ = true;
  }

  /// Steps with the mean of the gradients that were kept and begins a new window. `before_step` is
  /// called when the parameters' gradients hold that mean, to clip them, say, in whichever form:
  /// for the scaler, they are unscaled. Skipped if none was kept. Error, without a `before_step`: a
  /// clip since the window's first micro-batch, for it found no gradients. After an exception from
  /// `before_step` or the optimizer's step, the window is as it was, and step() may be called
  /// again.
  SafeAccumulationResult step(const std::function<void()>& before_step = nullptr) {
    TORCH_CHECK(window_->pending > 0,
                "SafeAccumulation::step: there is no micro-batch. Call backward(loss) first.");
    check_ready("step");
    TORCH_CHECK(before_step || !detail::PlainClips::any_in_vain_since(began_at_, optimizer_, false),
                "SafeAccumulation::step: a clip came before this call, and found no gradients: the "
                "sums are kept apart. Clip in a function that is given to step(), as in step([&] { "
                "clip_grad_norm_(optimizer, 1.); }).");
    warn_of_others("step");
    detail::clear_gradients(optimizer_);  // a step that has failed may have left its own
    is_clear_ = false;
    auto kept = std::make_shared<detail::ReadOnce<double>>(sum_.kept());
    at::Tensor skipped;  // memory for what comes after the step, where nothing may fail
    if (kept->tensor.defined()) skipped = at::empty_like(kept->tensor);
    at::Tensor flag = sum_.give_mean_to(optimizer_, *kept);
    if (scaler_.is_enabled()) {
      detail::ScalerParts::ledger(scaler_).take_unscaled(optimizer_, std::move(flag), sum_.any());
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

  /// Drops what was added, clears the parameters' gradients, those of a model under MasterWeights,
  /// too, and begins a new window.
  void discard() {
    clear();
    detail::drop_model_gradients(optimizer_);
  }

  /// Micro-batches since the last step, dropped ones included.
  int64_t pending() const { return window_->pending; }

 private:
  void warn_of_others(const char* call) {
    const auto any = [](const at::Tensor&) { return true; };
    if (!is_clear_ || warned_ || !detail::any_gradient(optimizer_, any)) return;
    warned_ = true;
    TORCH_WARN("SafeAccumulation::", call,
               ": the parameters have gradients that come from no backward() of this accumulation, "
               "and they are dropped. Call accumulation.backward(loss) for every loss. (If they "
               "are not to count, drop them by zero_grad().) This is said once.");
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
