// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/host_values.h"
#include "torchamp/detail/scaler/skip_count.h"
#include "torchamp/detail/shards.h"
#include "torchamp/missing_gradients.h"

namespace torchamp::detail {

/// What a StepResult answers from; shared by its copies.
struct StepRecord {
  ReadOnce<bool> found_inf;
  bool had_gradients = true;
  ReadOnce<double> scale;         ///< what the gradients were scaled by
  ReadOnce<double> skips_before;  ///< bad iterations in a row before this one, if not lazy_skips
  SkipCount lazy_skips{};
  at::Tensor value;  ///< what the optimizer's step returned
  std::vector<MissingGradient> missing;
  int64_t attempts = 1;  ///< evaluations of the first loss, for closures

  /// Bad iterations in a row before this one; reads the device where the host does not know.
  double read_skips_before() {
    if (lazy_skips.defined() && !skips_before.tensor.defined()) {
      skips_before.tensor = lazy_skips.tensor();
    }
    return skips_before.read();
  }

  /// Makes later changes of the scale's state invisible.
  void keep() {
    scale.keep();
    if (!lazy_skips.defined()) skips_before.keep();
  }
};

/// How many parameters of `optimizer` have one. Reads no device.
inline std::size_t count_gradients(const torch::optim::Optimizer& optimizer) {
  std::size_t count = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.defined() && parameter.unsafeGetTensorImpl()->grad().defined()) ++count;
    }
  }
  return count;
}

/// How often this thread has moved gradients to master weights.
inline uint64_t& gradients_taken() {
  static thread_local uint64_t times = 0;
  return times;
}

/// How far an optimizer has come in this iteration, see Note [An iteration].
struct OptimizerState {
  enum class Stage { ready, unscaled, stepped };
  Stage stage = Stage::ready;
  ReadOnce<bool> found_inf;    ///< undefined while ready
  at::Tensor largest{};        ///< magnitude of the scaled gradients, where the update wants it
  bool had_gradients = false;  ///< at least one was checked
  bool agreed = false;         ///< agree_found_inf has been called
  bool rechecked = false;      ///< and that step() has looked once more
  bool exact = false;          ///< the flag is 0 or 1, as kernels want it
  std::size_t gradients = 0;   ///< how many there were when they were unscaled
  uint64_t taken = 0;          ///< gradients_taken() then
  std::shared_ptr<Shards> shards{};  ///< who must agree, where they are shards of gradients
};

/// The states of the few optimizers that one scaler serves, by identity, in order of appearance.
class OptimizerStates {
 public:
  struct Entry {
    const torch::optim::Optimizer* optimizer;
    OptimizerState state{};
  };

  /// Stays valid until clear().
  OptimizerState& of(const torch::optim::Optimizer& optimizer) {
    for (Entry& entry : entries_) {
      if (entry.optimizer == &optimizer) return entry.state;
    }
    entries_.push_back({&optimizer});
    return entries_.back().state;
  }

  const OptimizerState* find(const torch::optim::Optimizer& optimizer) const {
    for (const Entry& entry : entries_) {
      if (entry.optimizer == &optimizer) return &entry.state;
    }
    return nullptr;
  }

  bool within_iteration() const {
    for (const Entry& entry : entries_) {
      if (entry.state.stage != OptimizerState::Stage::ready) return true;
    }
    return false;
  }

  /// Makes one ready again, in place.
  void reset(const torch::optim::Optimizer& optimizer) {
    for (Entry& entry : entries_) {
      if (entry.optimizer == &optimizer) entry.state = OptimizerState{};
    }
  }

  auto begin() { return entries_.begin(); }
  auto end() { return entries_.end(); }
  void clear() { entries_.clear(); }

 private:
  std::list<Entry> entries_;
};

/// A window of gradient accumulation.
struct AccumulationWindow {
  const torch::optim::Optimizer* optimizer;
  int64_t pending = 0;    ///< micro-batches
  bool was_used = false;  ///< the scaler has unscaled or stepped with them in an earlier iteration
};

/// The windows that take their gradients from one scaler. One that is gone has none.
class OpenWindows {
 public:
  void add(const std::shared_ptr<AccumulationWindow>& added) {
    for (std::size_t i = windows_.size(); i-- > 0;) {
      const auto window = windows_[i].lock();
      if (window && window != added) continue;
      windows_[i].swap(windows_.back());
      windows_.pop_back();
    }
    windows_.push_back(added);
  }

  bool any() const {
    for (const auto& weak : windows_) {
      const auto window = weak.lock();
      if (window && window->pending > 0) return true;
    }
    return false;
  }

  /// Notes whose gradients the scaler has used in the iteration that ends.
  void end_iteration(const OptimizerStates& states) const {
    for (const auto& weak : windows_) {
      const auto window = weak.lock();
      if (!window || window->pending == 0) continue;
      const OptimizerState* const state = states.find(*window->optimizer);
      window->was_used |= state && state->stage != OptimizerState::Stage::ready;
    }
  }

 private:
  std::vector<std::weak_ptr<AccumulationWindow>> windows_;
};

}  // namespace torchamp::detail
