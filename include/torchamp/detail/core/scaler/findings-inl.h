// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>

#include <optional>
#include <utility>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/version.h"

namespace torchamp::detail {

TORCHAMP_COLD void agree(OptimizerState& state, LossScale& scale, const LossWatch* losses) {
  if (state.agreed) return;
  const GradScalerOptions& options = scale.options();
  if (options.agree_found_inf || state.shards) {
    const InternalOps guard;
    at::Tensor found_inf = state.found_inf.tensor.clone();
    options.agree_found_inf ? options.agree_found_inf(found_inf)
                            : state.shards->agree_largest(found_inf);
    TORCHAMP_CHECK(found_inf.defined() && found_inf.numel() == 1,
                   "GradScaler: agree_found_inf has left no tensor of one element.");
    found_inf = found_inf.reshape({}).ne(0).to(scale.scale().options());
    state.found_inf = {std::move(found_inf), std::nullopt};
    state.exact = true;
  }
  if (losses) losses->mark(state.amax, scale.scale());
  if (const ScaleRule* const rule = scale.rule()) {
    rule->agree(options, state.shards.get(), scale.scale(), state.amax);
  }
  state.agreed = true;
}

/// What the optimizers of the iteration have found.
inline Findings findings_of(StepLedger& ledger, LossScale& scale) {
  Findings found;
  for (auto& entry : ledger.optimizers) {
    OptimizerState& state = entry.state;
    if (state.stage == OptimizerState::Stage::ready) continue;
    agree(state, scale, ledger.losses.get());
    if (!state.had_gradients && !scale.options().agree_found_inf) continue;
    const std::optional<bool> flag = state.found_inf.without_reading();
    found.known &= flag.has_value();
    if (state.amax.defined()) {
      found.known &= state.amax.is_cpu();
      found.amax = found.amax.defined() ? at::maximum(found.amax, state.amax) : state.amax;
    }
    found.bad |= flag.value_or(false);
    found.flags.push_back(state.found_inf.tensor);
  }
  return found;
}

}  // namespace torchamp::detail
