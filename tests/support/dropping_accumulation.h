// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/accumulate.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

/// An Accumulation that drops bad micro-batches, and whose windows the test ends.
class DroppingAccumulation : public torchamp::Accumulation {
 public:
  DroppingAccumulation(torchamp::GradScaler& scaler, torch::optim::Optimizer& optimizer,
                       int64_t micro_batches = std::numeric_limits<int64_t>::max())
      : Accumulation(scaler, optimizer, micro_batches, {.drop_bad = true}) {}

  /// flush() of a window that is not empty, with this function before the step.
  torchamp::AccumulationResult step(std::function<void()> before = nullptr) {
    before_step(std::move(before));
    return flush().value();
  }
};
