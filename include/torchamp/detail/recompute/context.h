// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "torchamp/autocast_state.h"
#include "torchamp/detail/rng_state.h"

namespace torchamp::detail {

// Note [Weight casts in a recomputed function]
// LibTorch's cache of cast weights hands out tensors with a history, to all threads. A cast from
// before the call would be an outer edge that the recomputation, which comes after the region has
// ended, cannot reach; and one of the recomputation, whose edges are cut, would reach the graphs of
// other threads. So the function does without that cache, both times. What torchamp's own cache
// keeps are values, and each use has a node of its own: these may be shared.

/// How the recomputation finds things as the forward found them.
struct RecomputeContext {
  AutocastState autocast = AutocastState::of_this_thread();
  std::optional<RngState> rng;      // unset: as it comes
  std::vector<at::Tensor> buffers;  // that the function changes, and that are to change once
};

/// Lets buffers be changed in copies while it lives.
class BufferScope {
 public:
  explicit BufferScope(const std::vector<at::Tensor>& buffers) {
    for (const at::Tensor& buffer : buffers) {
      if (!buffer.defined()) continue;
      before_.emplace_back(buffer, buffer.variable_data());
      buffer.set_data(buffer.detach().clone());
    }
  }
  BufferScope(const BufferScope&) = delete;
  BufferScope& operator=(const BufferScope&) = delete;
  ~BufferScope() {
    // Backwards: a buffer may be named twice.
    for (auto one = before_.rbegin(); one != before_.rend(); ++one)
      one->first.set_data(one->second);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

}  // namespace torchamp::detail
