// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>

#include <list>
#include <utility>

#include "torchamp/detail/found_inf.h"

namespace torchamp::detail {

/// How far an optimizer has come in this iteration, see Note [An iteration].
struct OptimizerState {
  enum class Stage { ready, unscaled, stepped };
  Stage stage = Stage::ready;
  FoundInf found_inf;          ///< undefined while ready
  bool had_gradients = false;  ///< at least one was checked
  bool agreed = false;         ///< agree_found_inf has been called
};

/// The states of the few optimizers that one scaler serves, by identity, in order of appearance.
class OptimizerStates {
 public:
  /// Stays valid until clear().
  OptimizerState& of(const torch::optim::Optimizer& optimizer) {
    for (auto& [key, state] : states_) {
      if (key == &optimizer) return state;
    }
    return states_.emplace_back(&optimizer, OptimizerState{}).second;
  }

  const OptimizerState* find(const torch::optim::Optimizer& optimizer) const {
    for (const auto& [key, state] : states_) {
      if (key == &optimizer) return &state;
    }
    return nullptr;
  }

  bool within_iteration() const {
    for (const auto& [key, state] : states_) {
      if (state.stage != OptimizerState::Stage::ready) return true;
    }
    return false;
  }

  auto begin() { return states_.begin(); }
  auto end() { return states_.end(); }
  void clear() { states_.clear(); }

 private:
  std::list<std::pair<const torch::optim::Optimizer*, OptimizerState>> states_;
};

}  // namespace torchamp::detail
