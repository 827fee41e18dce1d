// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/gradient_sum.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/scaled_step.h"

namespace torchamp {

/// Gradient accumulation: `micro_batches` losses make one step of `optimizer`.
///
///     torchamp::Accumulation accumulation(scaler, optimizer, 4);
///     for (auto& batch : *loader) {
///       if (auto result = accumulation.backward(loss_of(batch))) schedule.step();
///     }
///     accumulation.flush();
///
/// The gradients are those of the mean of the losses. The scale is the same for all of them: that
/// it was changed within a window is an error, after which discard() begins a new one. One bad
/// micro-batch spoils the whole step; see SafeAccumulation. Holds references to scaler and
/// optimizer. One thread at a time.
class Accumulation {
 public:
  Accumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer, int64_t micro_batches)
      : scaler_(scaler), optimizer_(optimizer), micro_batches_(micro_batches) {
    TORCH_CHECK_VALUE(micro_batches >= 1, "Accumulation: micro_batches is ", micro_batches,
                      ". It is 1 or more.");
  }

  /// Called with the gradients complete and unscaled, to clip them, say. Once set, step() is
  /// preceded by unscale_.
  void before_step(std::function<void()> call) { before_step_ = std::move(call); }

  /// Adds the gradients of `loss`. The last micro-batch of a window also steps, calls update(),
  /// clears the gradients, and returns the result.
  std::optional<StepResult> backward(const at::Tensor& loss) {
    TORCH_CHECK_VALUE(loss.defined(), "Accumulation::backward: the loss is undefined.");
    const at::Tensor scaled = scaler_.scale(at::div(loss, static_cast<double>(micro_batches_)));
    if (pending_ == 0) {
      version_ = version_of_scale();
    } else {
      check_scale("backward");
    }
    scaled.backward();
    if (++pending_ < micro_batches_) return std::nullopt;
    return flush();
  }

  /// Steps with an incomplete window, at the end of an epoch: its gradients are those of the sum of
  /// the losses over `micro_batches`. Nothing if none is pending.
  std::optional<StepResult> flush() {
    if (pending_ == 0) return std::nullopt;
    check_scale("flush");
    if (before_step_) {
      if (!scaler_.is_unscaled(optimizer_)) scaler_.unscale_(optimizer_);
      before_step_();
    }
    StepResult result = scaler_.step(optimizer_);
    discard();
    scaler_.update();
    return result;
  }

  /// Clears the gradients of an incomplete window and begins a new one.
  void discard() {
    optimizer_.zero_grad();
    pending_ = 0;
  }

  /// Micro-batches since the last step.
  int64_t pending() const { return pending_; }

 private:
  int64_t version_of_scale() const {
    const at::Tensor scale = scaler_.scale_tensor();
    return scale.defined() ? static_cast<int64_t>(scale._version()) : 0;
  }
  void check_scale(const char* call) const {
    TORCH_CHECK(version_of_scale() == version_, "Accumulation::", call,
                ": the scale has changed after ", pending_, " of ", micro_batches_,
                " micro-batches, whose gradients still have the old one. Leave step and update to "
                "the accumulation, or call flush() before; call discard() to drop them.");
  }

  GradScaler& scaler_;
  torch::optim::Optimizer& optimizer_;
  int64_t micro_batches_;
  int64_t pending_ = 0;
  int64_t version_ = 0;  // of the scale, at the start of the window
  std::function<void()> before_step_;
};

/// What came of a SafeAccumulation's step. Answers read the device once at most, as StepResult's
/// do.
class SafeAccumulationResult {
 public:
  /// False if every micro-batch was dropped.
  bool stepped() const { return kept_->read() > 0.; }
  explicit operator bool() const { return stepped(); }
  int64_t kept() const { return static_cast<int64_t>(kept_->read()); }
  int64_t dropped() const { return micro_batches_ - kept(); }
  int64_t micro_batches() const { return micro_batches_; }

 private:
  friend class SafeAccumulation;
  SafeAccumulationResult(std::shared_ptr<detail::LazyNumber> kept, int64_t micro_batches)
      : kept_(std::move(kept)), micro_batches_(micro_batches) {}

  std::shared_ptr<detail::LazyNumber> kept_;
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
/// growth_interval counts micro-batches. Whether one is kept is decided on the device. The step is
/// made with the mean over those that were kept. Costs one fp32 sum for each parameter (fp64 for
/// fp64 parameters), and reads nothing except once in step() for an optimizer that is no
/// ScaledStep. Gradients are dense. Holds references to scaler and optimizer. One thread at a time.
class SafeAccumulation {
 public:
  SafeAccumulation(GradScaler& scaler, torch::optim::Optimizer& optimizer)
      : scaler_(scaler), optimizer_(optimizer) {}

  /// Computes the gradients of `loss` and adds them, unless one holds an inf or a NaN. Clears the
  /// parameters' gradients before and after. (If update() throws, at a limit of the scaler, the
  /// micro-batch has been added or dropped.)
  void backward(const at::Tensor& loss) {
    optimizer_.zero_grad();
    scaler_.scale(loss).backward();
    detail::GradientSum::check(optimizer_);
    scaler_.unscale_(optimizer_);
    const at::Tensor found_inf = scaler_.found_inf(optimizer_);
    sum_.add(optimizer_, found_inf);
    ++micro_batches_;
    optimizer_.zero_grad();
    scaler_.update();
  }

  /// Steps with the mean of the gradients that were kept and begins a new window. `before_step` is
  /// called when the parameters' gradients hold that mean, to clip them, say. Skipped if none was
  /// kept.
  SafeAccumulationResult step(const std::function<void()>& before_step = nullptr) {
    TORCH_CHECK(micro_batches_ > 0,
                "SafeAccumulation::step: there is no micro-batch. Call backward(loss) first.");
    auto kept = std::make_shared<detail::LazyNumber>(sum_.move_mean_to(optimizer_));
    if (before_step) before_step();
    if (auto* const fused = dynamic_cast<ScaledStep*>(&optimizer_)) {
      fused->step_scaled({}, sum_.none_kept(*kept));
    } else if (kept->read() > 0.) {
      optimizer_.step();
    }
    optimizer_.zero_grad();
    sum_.clear();
    return {std::move(kept), std::exchange(micro_batches_, 0)};
  }

  /// Micro-batches since the last step, dropped ones included.
  int64_t pending() const { return micro_batches_; }

 private:
  GradScaler& scaler_;
  torch::optim::Optimizer& optimizer_;
  detail::GradientSum sum_;
  int64_t micro_batches_ = 0;
};

}  // namespace torchamp
