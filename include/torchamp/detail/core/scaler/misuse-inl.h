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
  {
    const std::scoped_lock lock(backward->mutex_);
    if (!scaled.requires_grad() || scaled.numel() != 1) backward->has_scaled_gradient_ = true;
    if (!scaled.requires_grad()) return;
    if (backward->plain_steps_.is_looking()) backward->plain_steps_.add_leaves(scaled);
  }
  scaled.register_hook([backward](const at::Tensor&) {
    on_begin(backward, torch::autograd::get_current_graph_task_id());
  });
}

TORCHAMP_COLD void ScaledBackward::on_begin(const std::shared_ptr<ScaledBackward>& backward,
                                            int task) {
  const std::scoped_lock lock(backward->mutex_);
  const bool is_first_of_iteration = !std::exchange(backward->has_run_, true);
  if (is_first_of_iteration) backward->look_for_kept_gradients();
  if (!backward->watches_gradients()) return;
  // One backward may come to several scaled losses.
  const bool is_first_of_task = std::exchange(backward->task_, task) != task;
  if (!is_first_of_task) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [backward, at_begin = backward->find_unscaled(),
       weights = backward->plain_steps_.begin_backward()] { backward->on_end(at_begin, weights); });
}

TORCHAMP_COLD void ScaledBackward::on_end(const std::vector<Found>& at_begin,
                                          const std::vector<PlainSteps::Scaled>& weights) {
  const std::scoped_lock lock(mutex_);
  plain_steps_.end_backward(weights);
  for (const Found& found : at_begin) {
    const at::Tensor now = gradient_of(found.parameter.lock());
    if (found.gradient.is_unchanged(now)) continue;
    added_.emplace_back(now);
    if (found.is_as_left) unscaled_.note_added_to(found.owner, found.parameter, now);
  }
}

TORCHAMP_COLD auto ScaledBackward::find_unscaled() const -> std::vector<Found> {
  std::vector<Found> found;
  unscaled_.for_each(
      [&](const UnscaledGradients::Name& owner, const UnscaledGradients::Left& left) {
        const at::Tensor now = gradient_of(left.parameter.lock());
        const bool is_as_left = now.defined() && left.gradient.is_unchanged(now);
        found.push_back({owner, left.parameter, SeenTensor(now), is_as_left});
      });
  return found;
}

TORCHAMP_COLD void ScaledBackward::look_for_kept_gradients() {
  for (const UnscaledGradients::Left& left : last_left_) {
    has_kept_gradients_ |= left.gradient.is_unchanged(gradient_of(left.parameter.lock()));
  }
}

}  // namespace torchamp::detail
