// SPDX-License-Identifier: BSD-3-Clause
// The overflow flag of several processes.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/detail/core/scaler/step.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [What processes agree on]
//
// Several processes take the same steps and have the same scale if each uses the flag of all.
// agree() is a collective: it returns when all processes have called it. So all processes must call
// it equally often, and for their optimizers in the same order. They do, because they make the same
// calls of the scaler. It is called by
//
//   found_inf()   reached: a later step uses the flag, unless options().recheck checks once more,
//                 in all processes alike
//   step()        binding: a step may throw in one process only and be tried again there. That step
//                 neither checks nor agrees again, because the others do not call agree().
//   update()      for optimizers that were unscaled and not stepped
//
// Each call agrees only if the optimizer's state is Agreement::none.

/// Whether other processes must agree.
inline bool has_others(const OptimizerState& state, const GradScalerOptions& options) {
  for (const MeasuredRow& row : measured_rows) {
    if (row.function != nullptr && options.*row.function) return true;
  }
  return state.shards != nullptr;
}

/// Replaces the measured numbers by the numbers of all processes, once.
TORCHAMP_BODY void agree(OptimizerState& state, LossScale& scale) {
  if (state.agreement != OptimizerState::Agreement::none) return;
  const GradScalerOptions& options = scale.options();
  if (has_others(state, options)) {
    const InternalOps guard;
    for (const MeasuredRow& row : measured_rows) {
      ReadOnce& number = state.measured.*row.number;
      if (!number.tensor.defined()) continue;
      at::Tensor agreed = number.tensor.clone();
      row.agree(options, state.shards.get(), agreed);
      number = {.tensor = std::move(agreed)};
    }
  }
  state.agreement = OptimizerState::Agreement::reached;
}

/// agree() for a step, only once even if the step is tried again.
inline void agree_for_step(OptimizerState& state, LossScale& scale) {
  agree(state, scale);
  if (has_others(state, scale.options())) state.agreement = OptimizerState::Agreement::binding;
}

}  // namespace TORCHAMP_NAMESPACE::detail
