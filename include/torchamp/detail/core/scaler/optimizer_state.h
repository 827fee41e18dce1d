// SPDX-License-Identifier: BSD-3-Clause
// The stage of an optimizer in an iteration, and the calls that each stage allows.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/optimizer_identity.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [An iteration]
//
// An iteration runs from one update() to the next. In it, each optimizer is, in this order,
//
//   ready     scale(), backward(), and as often as the program accumulates
//   unscaled  unscale_(): the gradients are divided by the scale, and whether one of them was inf
//             or NaN is recorded. step() does this first if the program has not.
//   stepped   step(): the optimizer has stepped or been skipped
//
// update() collects the flags of all optimizers and makes them "ready". So several optimizers share
// one scale: each skips separately, but one bad optimizer lowers the scale for all. An optimizer
// that was destroyed still counts for the scale. Note [Which optimizer it is] describes when a new
// optimizer is mistaken for it.
//
// Gradients are checked when they are unscaled. If the program writes an inf afterwards, the step
// uses it (but see GradScalerOptions::recheck). After a skipped step the other gradients are
// unscaled. If a ScaledStep optimizer is "ready", the gradients are only checked, and the optimizer
// divides them. At a scale below 1 the division may turn a finite gradient into an inf, so the
// quotients are also checked; see LossScale::may_be_below_one().

/// The stage of an optimizer in this iteration, see Note [An iteration].
struct OptimizerState {
  enum class Stage { ready, unscaled, stepped };
  /// Which gradients `measured` covers, see Note [What processes agree on]. Without other processes
  /// it has no meaning.
  enum class Agreement {
    none,     ///< gradients of this process
    reached,  ///< gradients of all processes; a recheck begins anew
    binding,  ///< like reached, even for a step that is tried again
  };
  Stage stage = Stage::ready;
  Measured measured{};         ///< undefined while ready
  bool had_gradients = false;  ///< at least one was checked
  Agreement agreement = Agreement::none;
  bool in_closure = false;           ///< a step with a closure is being made
  std::size_t gradients = 0;         ///< their number when they were unscaled
  uint64_t moved = 0;                ///< gradients_moved() then
  std::shared_ptr<Shards> shards{};  ///< who must agree, if the parameters are shards
};

/// The calls that depend on an optimizer's stage in the iteration.
enum class Call { unscale, clip, step };

/// A call that an optimizer's stage does not allow, and its error. All other calls are allowed.
struct ForbiddenCall {
  bool in_closure;  ///< in the closure of the optimizer's step, at any stage
  OptimizerState::Stage stage;
  Call call;
  const char* error;
};
inline constexpr ForbiddenCall forbidden_calls[] = {
    {false, OptimizerState::Stage::unscaled, Call::unscale,
     "the gradients of this optimizer have been unscaled already. Call unscale_ once for each "
     "optimizer between two calls of update(). (If an exception came before update(), call "
     "discard(optimizer).)"},
    {false, OptimizerState::Stage::stepped, Call::unscale,
     "this optimizer has been stepped already. Call unscale_ before step, and update() after it."},
    {false, OptimizerState::Stage::stepped, Call::clip,
     "this optimizer has been stepped already in this iteration. Clip between backward() and "
     "step(), and call update() after the last step()."},
    {false, OptimizerState::Stage::stepped, Call::step,
     "this optimizer has been stepped already. Call update() once all optimizers have been "
     "stepped. "
     "(If an exception came before update(), call discard(optimizer).)"},
    {true, OptimizerState::Stage::ready, Call::unscale,
     "the closure of this optimizer's step has called unscale_. Let it only compute and return the "
     "loss: step unscales."},
    {true, OptimizerState::Stage::ready, Call::step,
     "the closure of this optimizer's step has called step(). Let it only compute and return the "
     "loss."},
};

/// Throws if the call is not allowed; `name` begins the error text.
inline void check_allowed(const OptimizerState& state, Call call, const char* name) {
  for (const ForbiddenCall& one : forbidden_calls) {
    const bool applies = one.in_closure ? state.in_closure : one.stage == state.stage;
    TORCHAMP_CHECK(!applies || one.call != call, name, ": ", one.error);
  }
}

/// The states of a scaler's few optimizers, in order of appearance; see
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

  /// Makes an optimizer ready again, in place.
  void reset(const torch::optim::Optimizer& optimizer) {
    OptimizerState* const state = find(optimizer);
    if (state) *state = {.in_closure = state->in_closure};
  }

  auto begin() { return entries_.begin(); }
  auto end() { return entries_.end(); }
  /// Ends the iteration of all optimizers, except in whose closure update() was called.
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

}  // namespace TORCHAMP_NAMESPACE::detail
