// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/host_values.h"
#include "torchamp/detail/scaler/scale_bound.h"
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

/// Error: two parameters with one gradient, which a step that divides would divide twice.
inline void check_none_is_shared(const torch::optim::Optimizer& optimizer) {
  std::map<const c10::TensorImpl*, const c10::TensorImpl*> owner_of;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined() || !parameter.unsafeGetTensorImpl()->grad().defined()) continue;
      const c10::TensorImpl* const owner = parameter.unsafeGetTensorImpl();
      const auto found = owner_of.emplace(owner->grad().unsafeGetTensorImpl(), owner).first;
      TORCH_CHECK_VALUE(found->second == owner, "GradScaler::step: the gradient of a parameter ",
                        parameter.sizes(),
                        " is that of another one, too, and the fused step would divide it twice. "
                        "Give one of them a clone(), or call unscale_ before step.");
    }
  }
}

/// How often this thread has moved gradients to master weights.
inline uint64_t& gradients_taken() {
  static thread_local uint64_t times = 0;
  return times;
}
/// Whether masters that `optimizer` steps were given gradients after the first `times` of these.
inline bool any_taken_after(const torch::optim::Optimizer& optimizer, uint64_t times) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const WeightMeta* const meta = parameter.defined() ? weight_meta_of(parameter) : nullptr;
      if (meta && meta->taken > times) return true;
    }
  }
  return false;
}

// Note [Which optimizer it is]
// An optimizer's address does not tell: another one may be made there as soon as it is gone, and it
// may be moved. LibTorch's has no name either. But each has a map of states of its own, which moves
// with it and has a load factor at which it grows, 1/2 by default. So an optimizer of which
// something is recorded gets a load factor of its own, a little below that.

/// Numbers optimizers.
class OptimizerNumber {
 public:
  /// 0 if `optimizer` has got none.
  static uint32_t of(const torch::optim::Optimizer& optimizer) {
    const float below_half = 0.5F - optimizer.state().max_load_factor();
    const bool is_ours = below_half > 0.F && below_half <= static_cast<float>(count) * spacing;
    return is_ours ? static_cast<uint32_t>(below_half / spacing) : 0;
  }

  /// Gives it one, if it has none.
  static uint32_t give(torch::optim::Optimizer& optimizer) {
    static std::atomic<uint32_t> last = 0;
    if (of(optimizer) == 0) {
      const uint32_t number = last++ % count + 1;
      optimizer.state().max_load_factor(0.5F - static_cast<float>(number) * spacing);
    }
    return of(optimizer);
  }

 private:
  static constexpr float spacing = 0x1p-25F;  // of fp32 numbers just below 1/2
  static constexpr uint32_t count = 1U << 21;
};

class UnscaledGradients;

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
  bool in_closure = false;     ///< a step with a closure is being made
  std::size_t gradients = 0;   ///< how many there were when they were unscaled
  uint64_t taken = 0;          ///< gradients_taken() then
  std::shared_ptr<Shards> shards{};  ///< who must agree, where they are shards of gradients
  std::shared_ptr<UnscaledGradients> watched{};  ///< by scaled losses, after unscale_
};

/// The states of the few optimizers that one scaler serves, in order of appearance; see Note [Which
/// optimizer it is].
class OptimizerStates {
 public:
  struct Entry {
    uint32_t optimizer;
    OptimizerState state{};
  };

  /// Stays valid until clear().
  OptimizerState& of(torch::optim::Optimizer& optimizer) {
    const uint32_t number = OptimizerNumber::give(optimizer);
    if (OptimizerState* const state = find(number)) return *state;
    entries_.push_back({number});
    return entries_.back().state;
  }

  /// Null if there is none.
  OptimizerState* find(uint32_t number) {
    for (Entry& entry : entries_) {
      if (entry.optimizer == number) return &entry.state;
    }
    return nullptr;
  }
  OptimizerState* find(const torch::optim::Optimizer& optimizer) {
    return find(OptimizerNumber::of(optimizer));
  }
  const OptimizerState* find(const torch::optim::Optimizer& optimizer) const {
    return const_cast<OptimizerStates*>(this)->find(optimizer);
  }

  bool within_iteration() const {
    for (const Entry& entry : entries_) {
      if (entry.state.stage != OptimizerState::Stage::ready) return true;
    }
    return false;
  }

  /// Makes one ready again, in place.
  void reset(const torch::optim::Optimizer& optimizer) {
    OptimizerState* const state = find(optimizer);
    if (!state) return;
    const bool in_closure = state->in_closure;
    *state = {};
    state->in_closure = in_closure;
  }

  auto begin() { return entries_.begin(); }
  auto end() { return entries_.end(); }
  /// Ends the iteration of all but those whose closure has ended it.
  void clear() {
    entries_.remove_if([](const Entry& entry) { return !entry.state.in_closure; });
  }

 private:
  std::list<Entry> entries_;
};

/// A window of gradient accumulation.
struct AccumulationWindow {
  uint32_t optimizer;     ///< its number
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
  void end_iteration(OptimizerStates& states) const {
    for (const auto& weak : windows_) {
      const auto window = weak.lock();
      if (!window || window->pending == 0) continue;
      const OptimizerState* const state = states.find(window->optimizer);
      window->was_used |= state && state->stage != OptimizerState::Stage::ready;
    }
  }

 private:
  std::vector<std::weak_ptr<AccumulationWindow>> windows_;
};

}  // namespace torchamp::detail
