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
  scaled.register_hook([backward](const at::Tensor&) { begin(backward); });
}

TORCHAMP_COLD void ScaledBackward::begin(const std::shared_ptr<ScaledBackward>& backward) {
  backward->has_run_ = true;
  const int task = torch::autograd::get_current_graph_task_id();
  const std::scoped_lock lock(backward->mutex_);
  if (backward->unscaled_.empty() || std::exchange(backward->task_, task) == task) return;
  std::vector<Found> gradients;
  for (const WeakTensor& one : backward->unscaled_) {
    gradients.push_back({one, SeenTensor(gradient_of(one.lock()))});
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [backward, gradients = std::move(gradients)] { backward->end(gradients); });
}

TORCHAMP_COLD void ScaledBackward::end(const std::vector<Found>& gradients) {
  const std::scoped_lock lock(mutex_);
  for (const Found& found : gradients) {
    const at::Tensor now = gradient_of(found.parameter.lock());
    if (!found.gradient.is_unchanged(now)) added_.emplace_back(now);
  }
}

}  // namespace torchamp::detail
