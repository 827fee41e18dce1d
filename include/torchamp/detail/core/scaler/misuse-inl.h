// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/misuse.h"
#include "torchamp/version.h"

namespace torchamp::detail {

TORCHAMP_COLD void ScaledBackward::watch(const std::shared_ptr<ScaledBackward>& backward,
                                         const at::Tensor& scaled) {
  if (!scaled.requires_grad()) {
    backward->has_run_ = true;
    return;
  }
  PlainSteps& steps = backward->plain_steps;
  if (steps.is_looking() && steps.add_leaves(scaled) &&
      !std::exchange(backward->warned_of_fp64_, true)) {
    warn(
        {"GradScaler::scale: every weight that this loss is computed from is fp64, which a region "
         "never casts, so all products were computed in fp64. Make the model fp32. This warning is "
         "given once."});
  }
  scaled.register_hook([backward](const at::Tensor&) { begin(backward); });
}

TORCHAMP_COLD void ScaledBackward::begin(const std::shared_ptr<ScaledBackward>& backward) {
  const int task = torch::autograd::get_current_graph_task_id();
  const std::scoped_lock lock(backward->mutex_);
  if (!backward->has_run_.exchange(true)) backward->look_for_kept_gradients();
  const bool looks = !backward->unscaled.empty() || backward->plain_steps.is_looking();
  if (!looks || std::exchange(backward->task_, task) == task) return;
  std::vector<Found> gradients;
  backward->unscaled.for_each(
      [&](const UnscaledGradients::Name& owner, const UnscaledGradients::Left& left) {
        const at::Tensor now = gradient_of(left.parameter.lock());
        gradients.push_back({{left.parameter, SeenTensor(now)},
                             owner,
                             now.defined() && left.gradient.is_unchanged(now)});
      });
  torch::autograd::Engine::get_default_engine().queue_callback(
      [backward, gradients = std::move(gradients)] { backward->end(gradients); });
}

TORCHAMP_COLD void ScaledBackward::look_for_kept_gradients() {
  for (const UnscaledGradients::Left& left : last_left_) {
    has_kept_gradients_ |= left.gradient.is_unchanged(gradient_of(left.parameter.lock()));
  }
}

TORCHAMP_COLD void ScaledBackward::end(const std::vector<Found>& gradients) {
  const std::scoped_lock lock(mutex_);
  if (plain_steps.is_looking()) plain_steps.note_gradients();
  for (const Found& found : gradients) {
    const at::Tensor now = gradient_of(found.gradient.parameter.lock());
    if (found.gradient.gradient.is_unchanged(now)) continue;
    added_.emplace_back(now);
    if (found.was_as_left) unscaled.note_added_to(found.owner, found.gradient.parameter, now);
  }
}

}  // namespace torchamp::detail
