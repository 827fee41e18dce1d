// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// The latest clips of this thread. Those that named a scaler count as clips that have found
/// gradients, and for nothing else.
class PlainClips {
 public:
  /// A clip has left this gradient, one of those that it has limited, or has found none and was
  /// given this parameter.
  static void note(const at::Tensor& gradient_or_parameter, bool knows_scale = false) {
    latest = tick();
    clips()[latest % most] = {latest, SeenTensor(gradient_or_parameter), knows_scale};
  }
  /// Whether one that was made after `time` has left one of these gradients as it is.
  static bool any_since(uint64_t time, const torch::optim::Optimizer& optimizer) {
    return latest > time && any_gradient(optimizer, [time](const at::Tensor& gradient) {
             return has_left(gradient, time);
           });
  }
  /// Whether one that was made after `time` has found none of these gradients, and no other has
  /// found one that is there now. `only_late`: not if there are none now either.
  static bool any_in_vain_since(uint64_t time, const torch::optim::Optimizer& optimizer,
                                bool only_late) {
    bool in_vain = false, found = false;
    if (latest <= time) return false;
    any_parameter(optimizer, [&](const at::Tensor& parameter) {
      const at::Tensor& gradient = gradient_of(parameter);
      for (const Clip& clip : clips()) {
        if ((only_late && !gradient.defined()) || clip.time <= time) continue;
        in_vain = in_vain || clip.left->is(parameter);
        found = found || clip.left->is(gradient);
      }
      return found;
    });
    return in_vain && !found;
  }
  /// Whether one that was made after `time`, and named no scaler, has left `gradient` as it is.
  TORCHAMP_RARE static bool has_left(const at::Tensor& gradient, uint64_t time) {
    return latest > time && std::any_of(clips().begin(), clips().end(), [&](const Clip& clip) {
             return clip.time > time && !clip.knows_scale && clip.left->is_unchanged(gradient);
           });
  }
  /// Later than all before, in all threads.
  static uint64_t tick() {
    static std::atomic<uint64_t> time = 0;
    return time.fetch_add(1, std::memory_order_relaxed) + 1;
  }

 private:
  static constexpr uint64_t most = 8;
  struct Clip {
    uint64_t time = 0;
    std::optional<SeenTensor> left{};
    bool knows_scale = false;
  };
  static std::array<Clip, most>& clips() {
    static thread_local std::array<Clip, most> clips;
    return clips;
  }
  static inline thread_local uint64_t latest = 0;
};

}  // namespace torchamp::detail
