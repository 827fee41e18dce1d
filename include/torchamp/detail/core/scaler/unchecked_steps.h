// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [A step that skips nothing]
// optimizer.step() after unscale_ steps with gradients that are unscaled, so it is right as long as
// they are finite; and a program may look whether they are, by found_inf() or by their norm, before
// it steps. So only harm that is done is told: unscale_ has found an inf or NaN, weights were
// written to after it, the scaler has not stepped them, and now one of them is not finite. What a
// device has found is copied without waiting, so there it is told some iterations later. Weights
// are read only where such an inf was found.

/// Tells steps of unscaled gradients that the scaler was not asked to take.
class UncheckedSteps {
 public:
  /// An optimizer has been unscaled in this iteration, and not stepped by the scaler; `written`:
  /// those of its weights that were written to since.
  TORCHAMP_RARE void add(const at::Tensor& found_inf, const std::vector<at::Tensor>& written) {
    if (warned_ || written.empty() || GraphBody::is_running()) return;
    const InternalOps guard;
    if (!found_inf_.defined()) weights_.clear();  // of the last iteration
    found_inf_ = found_inf_.defined() ? at::maximum(found_inf_, found_inf) : found_inf;
    for (const at::Tensor& weight : written) weights_.emplace_back(weight);
  }

  /// All of the iteration's optimizers were added.
  void end_iteration() {
    if (found_inf_.defined()) mirror_.send(found_inf_, /*meanwhile=*/0.F);
    found_inf_ = at::Tensor();
  }

  /// Whether to warn, which is so once at most. Not in a capture, which cannot read weights.
  bool look() {
    if (weights_.empty() || mirror_.empty() || mirror_[0] == 0 || GraphBody::is_running()) {
      return false;
    }
    const bool any_is_ruined = std::any_of(weights_.begin(), weights_.end(), is_ruined);
    weights_.clear();
    warned_ = warned_ || any_is_ruined;
    return any_is_ruined;
  }
  TORCHAMP_RARE static void warn_of_it() {
    warn(
        {"GradScaler::update: optimizer.step() after unscale_, or after a clip that names the "
         "scaler, has stepped with infs or NaNs, and weights are inf or NaN now. Call "
         "scaler.step(optimizer), which skips such a step, or step only if found_inf(optimizer) is "
         "0. This warning is given once."});
  }

 private:
  TORCHAMP_RARE static bool is_ruined(const WeakTensor& one) {
    const InternalOps guard;
    const at::Tensor weight = one.lock();
    return weight.defined() && !at::isfinite(weight).all().item<bool>();
  }

  bool warned_ = false;
  at::Tensor found_inf_;  // of this iteration
  HostMirror mirror_;     // of those before
  std::vector<WeakTensor> weights_;
};

}  // namespace torchamp::detail
