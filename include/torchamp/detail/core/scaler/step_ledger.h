// SPDX-License-Identifier: BSD-3-Clause
// What each optimizer of a scaler has done in the iteration.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/misuse.h"
#include "torchamp/detail/core/scaler/optimizer_identity.h"
#include "torchamp/detail/core/scaler/scaled_outputs.h"
#include "torchamp/detail/core/scaler/unchecked_steps.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [An iteration]
//
// An iteration runs from one update() to the next. In it, each optimizer is, in this order,
//
//   ready     scale(), backward(), and as often as the program accumulates
//   unscaled  unscale_(): the gradients are divided by the scale, and whether one of them was inf
//             or NaN is recorded. step() does this first if the program has not.
//   stepped   step(): the optimizer has stepped or been skipped
//
// update() collects what was recorded of all of them and makes them "ready". So one scale serves
// several optimizers, each of which skips by itself, while one bad optimizer lowers the scale for
// all. One that is gone still counts for the scale. Note [Which optimizer it is] says when another
// optimizer may be taken for it.
//
// Gradients are checked as they are when they are unscaled, so an inf that the program puts in
// afterwards is stepped with (but see GradScalerOptions::recheck). A skipped step leaves the other
// gradients unscaled. With a ScaledStep optimizer that is "ready", the gradients are only checked
// and the division is left to the optimizer. Below a scale of 1, dividing may turn a finite
// gradient into an inf, so the quotients are checked, too; see LossScale::may_be_below_one().

/// What a StepResult answers from; shared by its copies. At first, that of a disabled scaler.
struct StepRecord {
  ReadOnce<bool> found_inf{.on_host = false};
  bool had_gradients = true;
  ReadOnce<double> scale{.on_host = 1.};  ///< what the gradients were scaled by
  ReadOnce<double> skips{.on_host = 0.};  ///< bad iterations in a row before this one
  at::Tensor value{};                     ///< what the optimizer's step returned
  std::vector<MissingGradient> missing{};
  int64_t attempts = 1;  ///< evaluations of the first loss, for closures
};

/// How far an optimizer has come in this iteration, see Note [An iteration].
struct OptimizerState {
  enum class Stage { ready, unscaled, stepped };
  /// Whose gradients found_inf is of, see Note [What processes agree on]. Without other processes
  /// it is set all the same, and means nothing.
  enum class Agreement {
    none,     ///< this process's
    reached,  ///< those of all processes; a recheck begins anew
    binding,  ///< those too, and a step goes by them, also when it is tried again
  };
  Stage stage = Stage::ready;
  ReadOnce<bool> found_inf{};  ///< 0 or 1; undefined while ready
  at::Tensor amax{};           ///< magnitude of the scaled gradients, where the update wants it
  bool had_gradients = false;  ///< at least one was checked
  Agreement agreement = Agreement::none;
  bool in_closure = false;           ///< a step with a closure is being made
  std::size_t gradients = 0;         ///< how many there were when they were unscaled
  uint64_t moved = 0;                ///< gradients_moved() then
  std::shared_ptr<Shards> shards{};  ///< who must agree, where they are shards of gradients
};

/// The states of the few optimizers that one scaler serves, in order of appearance; see
/// Note [Which optimizer it is].
class OptimizerStates {
 public:
  struct Entry {
    OptimizerIdentity optimizer;
    OptimizerState state{};
  };

  /// Stays valid until clear().
  OptimizerState& of(const torch::optim::Optimizer& optimizer) {
    if (OptimizerState* const state = find(optimizer)) return *state;
    entries_.push_back({OptimizerIdentity(optimizer)});
    return entries_.back().state;
  }

  /// Null if there is none.
  OptimizerState* find(const torch::optim::Optimizer& optimizer) {
    return find_if([&](const Entry& entry) { return entry.optimizer.is(optimizer); });
  }
  const OptimizerState* find(const torch::optim::Optimizer& optimizer) const {
    return const_cast<OptimizerStates*>(this)->find(optimizer);
  }
  const OptimizerState* find(const OptimizerIdentity& optimizer) const {
    return const_cast<OptimizerStates*>(this)->find_if(
        [&](const Entry& entry) { return entry.optimizer == optimizer; });
  }

  bool within_iteration() const {
    return std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
      return entry.state.stage != OptimizerState::Stage::ready;
    });
  }

  /// Makes one ready again, in place.
  void reset(const torch::optim::Optimizer& optimizer) {
    OptimizerState* const state = find(optimizer);
    if (state) *state = {.in_closure = state->in_closure};
  }

  auto begin() { return entries_.begin(); }
  auto end() { return entries_.end(); }
  /// Ends the iteration of all but those whose closure has ended it.
  void clear() {
    entries_.remove_if([](const Entry& entry) { return !entry.state.in_closure; });
  }

 private:
  template <class Is>
  OptimizerState* find_if(const Is& is) {
    const auto found = std::find_if(entries_.begin(), entries_.end(), is);
    return found == entries_.end() ? nullptr : &found->state;
  }

  std::list<Entry> entries_;
};

/// A window of gradient accumulation.
struct AccumulationWindow {
  OptimizerIdentity optimizer{};
  int64_t pending = 0;    ///< micro-batches
  bool was_used = false;  ///< the scaler has unscaled or stepped with them in an earlier iteration
};

/// What a scaler has heard since the last update(): what it scaled, and how far each optimizer has
/// come.
class StepLedger {
 public:
  explicit StepLedger(const LossScale& scale)
      : order(!scale.options().dynamic),
        losses(scale.rule() ? scale.rule()->watch_losses(scale.options()) : nullptr) {}

  OptimizerStates optimizers;
  ScaledOutputs scaled;
  mutable StepOrder order;                                 // being asked for the scale counts
  std::vector<std::weak_ptr<AccumulationWindow>> windows;  // that take gradients from this scaler
  std::unique_ptr<LossWatch> losses;                       // with forgives_bad_losses

  /// A loss has become `scaled_output`: whoever scales that once more is told, and its backward
  /// tells that it has run. A number without a graph is no loss: the program gets the scale by it.
  void watch_scaled(const at::Tensor& scaled_output) {
    if (scaled_output.numel() == 1 && !scaled_output.requires_grad()) order.note_asked(false);
    scaled.add(scaled_output);
    ScaledBackward::watch(order.backward, scaled_output);
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
    warn({"GradScaler::step: no parameter of this optimizer has a gradient, so it was not stepped.",
          list.str()});
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
    record->scale = scale.scale_once();
    record->skips = scale.skips_once();
    record->value = std::move(value);
    record->missing = std::move(missing);
    record->attempts = attempts;
    if (!scale.host()) records_.push_back(record);
    return record;
  }

  /// Before the scale changes: lets the results that are still in use keep what they tell of it.
  void keep_results() {
    for (const auto& weak : records_) {
      const auto record = weak.lock();
      if (!record) continue;
      record->scale.keep();
      record->skips.keep();
    }
    records_.clear();
  }

  void end_iteration() {
    note_used_windows();
    const bool unchecked_step = look_for_unchecked_steps();
    optimizers.clear();
    const ScaledBackward::Told told = order.end_iteration();
    std::erase_if(records_, [](const auto& record) { return record.expired(); });
    if (losses) losses->forget();
    // Last: a warning may run the program's code, which may throw.
    if (unchecked_step) UncheckedSteps::warn_of_it();
    if (told.plain_step) StepOrder::warn_of_plain_step();
    if (told.all_fp64) StepOrder::warn_of_fp64();
  }

 private:
  /// Tells windows that still hold micro-batches that the program has unscaled or stepped these.
  void note_used_windows() const {
    for (const auto& weak : windows) {
      const auto window = weak.lock();
      if (!window || window->pending == 0) continue;
      const OptimizerState* const state = optimizers.find(window->optimizer);
      window->was_used |= state && state->stage != OptimizerState::Stage::ready;
    }
  }

  /// Whether to warn of one, of this iteration or, where a device tells later, of one before.
  bool look_for_unchecked_steps() {
    const bool any_before = unchecked_steps_.look();
    for (const auto& [optimizer, state] : optimizers) {
      if (state.stage != OptimizerState::Stage::unscaled || !state.had_gradients) continue;
      unchecked_steps_.add(state.found_inf.tensor, order.backward->written_weights(optimizer));
    }
    unchecked_steps_.end_iteration();
    return unchecked_steps_.look() || any_before;
  }

  UncheckedSteps unchecked_steps_;
  std::vector<std::weak_ptr<StepRecord>> records_;  // of steps since the scale changed last
  bool warned_of_missing_ = false;
};

}  // namespace torchamp::detail
