// SPDX-License-Identifier: BSD-3-Clause
// The scaler's work before an optimizer steps: it unscales gradients, checks for infs, and agrees
// with other processes on the result.
#pragma once

#include <torch/optim/optimizer.h>

#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Divides the gradients by the scale and checks them. Returns the optimizer's new state. `call`
/// begins the error texts.
TORCHAMP_BODY OptimizerState unscale_gradients(torch::optim::Optimizer& optimizer, LossScale& scale,
                                               const char* call);
/// Replaces the measured numbers by the numbers of all processes, once.
TORCHAMP_BODY void agree(OptimizerState& state, LossScale& scale);

}  // namespace TORCHAMP_NAMESPACE::detail
