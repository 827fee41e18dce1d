// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "torchamp/detail/gradients/attached.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/scaled_step.h"

namespace torchamp::detail {

/// What clips leave to the next step of an optimizer.
struct ClipLeft {
  /// Undefined if there is nothing.
  static Divisor to(const torch::optim::Optimizer& optimizer) {
    const auto* const defers = dynamic_cast<const DefersClips*>(&optimizer);
    return defers ? defers->deferred_clip_.of(optimizer) : Divisor();
  }
  /// False if this optimizer's gradients have to be multiplied now.
  static bool can_be_left_to(const torch::optim::Optimizer& optimizer) {
    return dynamic_cast<const DefersClips*>(&optimizer) != nullptr;
  }
  /// On top of what is left already. Only where it can be.
  static void add(torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    const InternalOps internal;
    dynamic_cast<DefersClips&>(optimizer).deferred_clip_.add(optimizer, divisor);
  }
  /// The same gradients have other values now. Asks no device for memory.
  static void keep(torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    forget(optimizer);
    add(optimizer, divisor);
  }
  static void forget(torch::optim::Optimizer& optimizer) {
    if (auto* const defers = dynamic_cast<DefersClips*>(&optimizer)) {
      defers->deferred_clip_.forget();
    }
  }
  /// ScaledStep::step_scaled(); `facts` are for those who defer clips.
  static at::Tensor step_scaled(ScaledStep& optimizer, const at::Tensor& grad_scale,
                                const at::Tensor& found_inf, const StepFacts& facts) {
    auto* const defers = dynamic_cast<DefersClips*>(&optimizer);
    if (!defers) return optimizer.step_scaled(grad_scale, found_inf);
    defers->step_knowing(grad_scale, found_inf, facts);
    return {};
  }
};

}  // namespace torchamp::detail
