// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <utility>

#include "torchamp/detail/core/scaler/scaled_loss.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY torch::autograd::variable_list ScaledLoss::operator()(
    const torch::autograd::variable_list& gradients) {
  const std::scoped_lock lock(backward_->mutex);
  if (backward_->divided.empty() && !backward_->check) return gradients;
  // One call of backward() may reach several scaled losses.
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(backward_->task, task) == task) return gradients;
  backward_->with_check([](OrderCheck& check) { check.note_backward_begins(); });
  torch::autograd::Engine::get_default_engine().queue_callback(
      // Runs once that call has written all gradients, and not if it throws.
      [backward = backward_, before = backward_->divided.backward_begins()] {
        const std::scoped_lock at_end(backward->mutex);
        backward->divided.backward_ends(before);
        backward->with_check([](OrderCheck& check) { check.note_backward_ends(); });
      });
  return gradients;
}

}  // namespace TORCHAMP_NAMESPACE::detail
