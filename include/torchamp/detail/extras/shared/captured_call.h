// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

using Tensors = std::vector<at::Tensor>;

/// The inputs of an iteration on a graph's device: inputs on the host are copied.
inline Tensors inputs_on(c10::Device device, const Tensors& inputs) {
  Tensors there = inputs;
  for (at::Tensor& input : there) {
    if (input.defined() && input.is_cpu()) input = input.to(device, /*non_blocking=*/true);
  }
  return there;
}

/// A call of an iteration that may be captured.
struct CapturedCall {
  /// The type of the function; functions of the same type share graphs.
  const std::type_info* function = nullptr;
  /// Whether it is one of several micro-batches, whose gradients add up, and its number.
  bool in_window = false;
  std::int64_t micro_batch = 0;
  /// Whether it steps: the last micro-batch does.
  bool steps = true;
  /// Undoes what a capture that failed has done on the host.
  std::function<void()> undo = nullptr;
};

/// What the body of an iteration returns. A replay returns what the capture has returned, whose
/// tensors it fills.
struct BodyResult {
  BodyResult() = default;
  BodyResult(Tensors made) : tensors(std::move(made)) {}

  Tensors tensors;
  std::shared_ptr<const void> of_step;  ///< a TrainingStep's TrainingResult
};

/// Captures the iterations of a TrainingStep and replays them.
struct StepCapture {
  std::function<const BodyResult&(const Tensors&, const CapturedCall&)> run;
  /// Calls a function on the stream of the graphs, whose memory it may use.
  std::function<void(const std::function<void()>&)> run_eagerly;
  /// The captured graphs are no longer valid: capture again.
  std::function<void()> capture_again;
  explicit operator bool() const { return run != nullptr; }
};

}  // namespace TORCHAMP_NAMESPACE::detail
