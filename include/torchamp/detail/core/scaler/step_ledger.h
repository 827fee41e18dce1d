// SPDX-License-Identifier: BSD-3-Clause
// The records of a scaler's optimizers in an iteration.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/check_order/order_check.h"
#include "torchamp/detail/core/gradients/optimizer_identity.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/optimizer_state.h"
#include "torchamp/detail/core/scaler/read_once.h"
#include "torchamp/detail/core/scaler/scaled_loss.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The data of a StepResult, which its copies share. Initially the data for a disabled scaler.
struct StepRecord {
  ReadOnce found_inf{.on_host = 0.};
  bool had_gradients = true;
  ReadOnce scale{.on_host = 1.};  ///< the gradients' scale
  ReadOnce skips{.on_host = 0.};  ///< bad iterations in a row before this one
  at::Tensor value{};             ///< the result of the optimizer's step
  std::vector<MissingGradient> missing{};
};

/// A window of gradient accumulation.
struct AccumulationWindow {
  OptimizerIdentity optimizer{};
  int64_t pending = 0;    ///< micro-batches
  bool was_used = false;  ///< the scaler has unscaled or stepped with them in an earlier iteration
};

/// Whether the scaler or the program has scaled in an iteration.
class ScaleUse {
 public:
  void note_scaled() {
    ++times_;
    scaled_ = true;
    if (GraphBody::is_running()) read_for_good_ = true;  // each replay also scales
  }
  bool was_scaled() const { return scaled_; }
  /// How often the scaler has scaled, in all iterations.
  uint64_t times_scaled() const { return times_; }

  /// Records that the program has read the scale. `for_good`: as a tensor that update() changes in
  /// place.
  void note_read(bool for_good) {
    read_ = true;
    read_for_good_ |= for_good;
  }
  /// Whether the program may multiply by the scale itself.
  bool was_read() const { return read_ || read_for_good_; }

  void end_iteration() { scaled_ = read_ = false; }

 private:
  uint64_t times_ = 0;
  bool scaled_ = false, read_ = false, read_for_good_ = false;
};

/// Records since the last update(): scaled losses, and the stage of each optimizer.
class StepLedger {
 public:
  explicit StepLedger(const LossScale& scale) : scale_is_fixed_(!scale.options().dynamic) {
    const int64_t checked = scale.options().check_order.first_iterations;
    if (checked > 0 && scale.options().enabled) backward->check.emplace(checked);
  }

  OptimizerStates optimizers;
  mutable ScaleUse use;                                    // a query of the scale counts
  std::vector<std::weak_ptr<AccumulationWindow>> windows;  // windows that use this scaler
  /// Shared with hooks, which may outlive the scaler.
  std::shared_ptr<ScaledBackward> backward = std::make_shared<ScaledBackward>();

  // ---- The events

  /// Records that a loss was scaled to `scaled`. A scalar without a graph is no loss: by it the
  /// program reads the scale.
  void note_scaled(const at::Tensor& scaled) {
    if (scaled.numel() == 1 && !scaled.requires_grad()) use.note_read(/*for_good=*/false);
    ScaledLoss::mark(scaled, backward);
    with_check([&](OrderCheck& check) { check.note_scaled(scaled); });
  }
  /// Records a loss that is unchanged, at a scale of 1.
  void note_not_scaled() {
    with_check([](OrderCheck& check) { check.note_loss_without_hook(); });
  }
  void note_scale_is_known() const {
    with_check([](OrderCheck& check) { check.note_scale_is_known(); });
  }

  /// Before the gradients of `optimizer` are divided: throws if one would be divided twice.
  void check_divides(const torch::optim::Optimizer& optimizer, const char* call) {
    {
      const std::scoped_lock lock(backward->mutex);
      backward->divided.check_divided_once(optimizer, call, /*writes_count=*/use.was_read());
    }
    warn_of(call, &OrderCheck::divides, &optimizer);
  }
  /// Records that unscale_ has divided the gradients.
  void note_unscaled(const torch::optim::Optimizer& optimizer, const OptimizerState& state) {
    note_divided(optimizer);
    with_check([&](OrderCheck& check) {
      check.note_unscaled(optimizer,
                          state.had_gradients ? state.measured.found_inf.tensor : at::Tensor());
    });
  }
  void check_steps(const torch::optim::Optimizer& optimizer) {
    warn_of("GradScaler::step", &OrderCheck::steps, &optimizer);
  }
  void note_stepped(const torch::optim::Optimizer& optimizer, const OptimizerState& state) {
    note_divided(optimizer);
    const bool skipped = state.had_gradients && state.measured.found_inf.without_reading() == 1.;
    with_check([&](OrderCheck& check) { check.note_stepped(optimizer, skipped); });
  }
  void discard(const torch::optim::Optimizer& optimizer) {
    optimizers.reset(optimizer);
    {
      const std::scoped_lock lock(backward->mutex);
      backward->divided.forget(optimizer);
    }
    with_check([&](OrderCheck& check) { check.forget(optimizer); });
  }

  /// Warns, once in a scaler's life, of an optimizer without any gradient, whose step is complete.
  void warn_of_missing(const std::vector<MissingGradient>& missing) {
    if (missing.empty() || std::exchange(warned_of_missing_, true)) return;
    std::ostringstream list;
    constexpr std::size_t most = 10;
    for (std::size_t i = 0; i < std::min(missing.size(), most); ++i) {
      list << "\n  " << missing[i];
    }
    if (missing.size() > most) list << "\n  and " << missing.size() - most << " more";
    warn({"GradScaler::step: no parameter of this optimizer has a gradient, so it was not stepped.",
          list.str()});
  }

  /// Records that the optimizer of `state` has stepped or was skipped; returns the data for a
  /// StepResult.
  std::shared_ptr<StepRecord> finish(OptimizerState& state, const LossScale& scale,
                                     at::Tensor value, std::vector<MissingGradient> missing) {
    state.stage = OptimizerState::Stage::stepped;
    auto record = std::make_shared<StepRecord>();
    record->found_inf = state.measured.found_inf;
    record->had_gradients = state.had_gradients;
    record->scale = scale.scale_once();
    record->skips = scale.skips_once();
    record->value = std::move(value);
    record->missing = std::move(missing);
    if (!scale.host()) records_.push_back(record);
    return record;
  }

  /// Before the scale changes: results that are still in use keep its present value.
  void keep_results() {
    for (const auto& weak : records_) {
      const auto record = weak.lock();
      if (!record) continue;
      record->scale.keep();
      record->skips.keep();
    }
    records_.clear();
  }

  /// Returns the mistakes that the iteration has shown.
  OrderCheck::Sentences end_iteration() {
    note_used_windows();
    optimizers.clear();
    std::erase_if(records_, [](const auto& record) { return record.expired(); });
    OrderCheck::Sentences sentences;
    with_check([&](OrderCheck& check) { sentences = check.updates(moment(nullptr)); });
    use.end_iteration();
    const std::scoped_lock lock(backward->mutex);
    backward->divided.clear();
    return sentences;
  }
  /// A warning may run the program's code, which may throw, or call the scaler.
  static void warn_of(const char* call, const OrderCheck::Sentences& sentences) {
    for (const char* sentence : sentences) {
      warn({call, ": ", sentence, " This warning is given once."});
    }
  }

 private:
  template <class F>
  void with_check(const F& f) const {
    const std::scoped_lock lock(backward->mutex);
    backward->with_check(f);
  }
  OrderCheck::Moment moment(const torch::optim::Optimizer* optimizer) const {
    return {.knows_scale = use.was_read(), .is_fixed = scale_is_fixed_, .optimizer = optimizer};
  }
  void warn_of(const char* call,
               OrderCheck::Sentences (OrderCheck::*event)(const OrderCheck::Moment&),
               const torch::optim::Optimizer* optimizer) {
    OrderCheck::Sentences sentences;
    with_check([&](OrderCheck& check) { sentences = (check.*event)(moment(optimizer)); });
    warn_of(call, sentences);
  }
  void note_divided(const torch::optim::Optimizer& optimizer) {
    const std::scoped_lock lock(backward->mutex);
    backward->divided.note(optimizer);
  }

  /// Records in windows with micro-batches that the program has unscaled or stepped them.
  void note_used_windows() const {
    for (const auto& weak : windows) {
      const auto window = weak.lock();
      if (!window || window->pending == 0) continue;
      const OptimizerState* const state = optimizers.find(window->optimizer);
      window->was_used |= state && state->stage != OptimizerState::Stage::ready;
    }
  }

  bool scale_is_fixed_;
  std::vector<std::weak_ptr<StepRecord>> records_;  // of steps since the scale changed last
  bool warned_of_missing_ = false;
};

}  // namespace TORCHAMP_NAMESPACE::detail
