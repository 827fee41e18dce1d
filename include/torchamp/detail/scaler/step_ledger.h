// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/scaler/loss_scale.h"
#include "torchamp/detail/scaler/step_order.h"
#include "torchamp/detail/scaler/step_record.h"
#include "torchamp/missing_gradients.h"

namespace torchamp::detail {

// Note [An iteration]
//
// An iteration runs from one update() to the next. In it, each optimizer is
//
//   ready     scale(), backward(), and as often as the program accumulates
//   unscaled  unscale_(): the gradients are divided by the scale, and whether one of them was inf
//             or NaN is recorded. step() does this first if the program has not.
//   stepped   step(): the optimizer has stepped or been skipped
//
// in this order. unscale_() wants "ready", step() "ready" or "unscaled". update() collects what was
// recorded of all of them and makes them "ready". So one scale serves several optimizers, each of
// which skips by itself, while one bad optimizer lowers the scale for all. One that is gone counts
// for the scale, and is not taken for another; see Note [Which optimizer it is].
//
// What is scaled and what is checked: gradients are checked as they are when they are unscaled, so
// an inf that the program puts in afterwards is stepped with (but see GradScalerOptions::recheck).
// A skipped step leaves the other gradients unscaled. With a ScaledStep optimizer that is "ready",
// the gradients are only checked and the division is left to the optimizer.
//
// Below a scale of 1, dividing may turn a finite gradient into an inf. That is looked for, too; see
// Note [A scale below 1].

/// The tensors that a scaler has made and that are still in use, to tell a loss that is scaled
/// twice. Known by identity alone: what is computed from one of them (its sum with another, its
/// gradients for a penalty) is not taken for it. Keeps none of them alive.
class ScaledOutputs {
 public:
  void check_not_in(const at::Tensor& output, const char* call) const {
    for (const Weak& tensor : scaled_) {
      TORCH_CHECK_VALUE(
          tensor._unsafe_get_target() != output.unsafeGetTensorImpl(), call,
          ": this tensor has been scaled already, and its gradients would be too large by the "
          "scale. Pass the loss as it was before scale().");
    }
  }

  void add(const at::Tensor& scaled) {
    std::erase_if(scaled_, [](const Weak& tensor) { return tensor.expired(); });
    scaled_.emplace_back(scaled.getIntrusivePtr());
    if (const auto& node = scaled.grad_fn()) {
      makers_[next_++ % makers_.size()] = {node.get(), node->sequence_nr()};
    }
  }

  /// Whether `node` has made one of the last few, which may be gone.
  bool are_made_by(const torch::autograd::Node& node) const {
    return std::any_of(makers_.begin(), makers_.end(), [&](const Maker& maker) {
      return maker.node == &node && maker.sequence == node.sequence_nr();
    });
  }

  /// Calls `f` with each of them.
  template <class F>
  void for_each(const F& f) const {
    for (const Weak& weak : scaled_) {
      if (auto tensor = weak.lock()) f(at::Tensor(std::move(tensor)));
    }
  }

 private:
  // While it exists, no other tensor can have that one's address.
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  // A node at the same address has another number.
  struct Maker {
    const torch::autograd::Node* node = nullptr;
    uint64_t sequence = 0;
  };

  std::vector<Weak> scaled_;
  std::array<Maker, 8> makers_{};
  std::size_t next_ = 0;
};

/// What a scaler has heard since the last update(): what it scaled, and how far each optimizer has
/// come.
class StepLedger {
 public:
  explicit StepLedger(const LossScale& scale)
      : losses(scale.rule() ? scale.rule()->watch_losses(scale.options()) : nullptr) {}

  OptimizerStates optimizers;
  ScaledOutputs scaled;
  mutable StepOrder order;  // being asked for the scale counts
  OpenWindows windows;
  std::unique_ptr<LossWatch> losses;  // with forgives_bad_losses

  /// `output` has become `scaled_output`.
  void note_scaled(const at::Tensor& scaled_output) {
    scaled.add(scaled_output);
    for (const auto& entry : optimizers) {
      if (entry.state.stage != OptimizerState::Stage::unscaled) continue;
      if (entry.state.watched) UnscaledGradients::watch(entry.state.watched, scaled_output);
    }
  }

  /// Makes a "ready" optimizer "unscaled" whose gradients are the program's own, with a flag that
  /// says whether to step.
  void take_unscaled(torch::optim::Optimizer& optimizer, at::Tensor found_inf, bool had_gradients) {
    optimizers.of(optimizer) = {.stage = OptimizerState::Stage::unscaled,
                                .found_inf = {std::move(found_inf), std::nullopt},
                                .had_gradients = had_gradients,
                                .gradients = count_gradients(optimizer),
                                .taken = gradients_taken(),
                                .shards = shards_of(optimizer, "GradScaler::step")};
  }

  /// Every parameter of an optimizer that has no gradient at all; warns once in a scaler's life.
  std::vector<MissingGradient> report_missing(const torch::optim::Optimizer& optimizer,
                                              at::Device loss_device) {
    std::vector<MissingGradient> missing = missing_gradients(optimizer, loss_device);
    if (std::exchange(warned_of_missing_, true)) return missing;
    std::ostringstream list;
    constexpr std::size_t most = 10;
    for (std::size_t i = 0; i < std::min(missing.size(), most); ++i) {
      list << "\n  " << missing[i];
    }
    if (missing.size() > most) list << "\n  and " << missing.size() - most << " more";
    TORCH_WARN(
        "GradScaler::step: no parameter of this optimizer has a gradient, so it was not stepped.",
        list.str());
    return missing;
  }

  /// The optimizer of `state` has stepped or been skipped; what a StepResult answers from.
  std::shared_ptr<StepRecord> finish(OptimizerState& state, const LossScale& scale,
                                     at::Tensor value, std::vector<MissingGradient> missing,
                                     int64_t attempts = 1) {
    state.stage = OptimizerState::Stage::stepped;
    auto record = std::make_shared<StepRecord>();
    record->found_inf = state.found_inf;
    record->had_gradients = state.had_gradients;
    if (const auto* host = scale.host()) {
      record->scale.on_host = host->scale;
      record->skips_before.on_host = host->skips;
    } else {
      record->scale.tensor = scale.scale();
      record->skips_before.tensor = scale.skips();
      record->lazy_skips = scale.lazy_skips();
      records_.push_back(record);
    }
    record->value = std::move(value);
    record->missing = std::move(missing);
    record->attempts = attempts;
    return record;
  }

  /// Before the scale changes: lets the results that are still in use keep what they tell of it.
  void keep_results() {
    for (const auto& weak : records_) {
      if (const auto record = weak.lock()) record->keep();
    }
    records_.clear();
  }

  void end_iteration() {
    windows.end_iteration(optimizers);
    optimizers.clear();
    order.end_iteration();
    records_.clear();
    if (losses) losses->forget();
  }

 private:
  std::vector<std::weak_ptr<StepRecord>> records_;  // of this iteration
  bool warned_of_missing_ = false;
};

// ---- What a scaler and its extras do in a step --------------------------------------------------

/// Divides the gradients by the scale, and checks them; what is known of them then.
TORCHAMP_BODY OptimizerState unscale_gradients(torch::optim::Optimizer& optimizer, LossScale& scale,
                                               const char* call);
/// Makes the processes agree on what was found, once.
TORCHAMP_BODY void agree(OptimizerState& state, LossScale& scale, const LossWatch* losses);
/// Throws where it has stepped already, or is stepping.
TORCHAMP_BODY void check_not_stepped(const OptimizerState& state);
/// Has masters notice a step that LibTorch's own optimizers may hide: SGD writes through data().
TORCHAMP_BODY void note_written(const torch::optim::Optimizer& optimizer);
/// What a disabled scaler's step returns.
TORCHAMP_BODY std::shared_ptr<StepRecord> unscaled_record(at::Tensor value);

}  // namespace torchamp::detail
