// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>

#include <atomic>
#include <cstdint>

#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Which optimizer it is]
// An optimizer's address does not identify it: it may be moved, and another one created there. But
// each has its own map of states, which moves with it and has a maximum load factor, 1/2 by
// default. So an optimizer with records gets a load factor of its own, slightly below that.

/// Numbers optimizers.
class OptimizerNumber {
 public:
  /// 0 if `optimizer` has got none.
  static uint32_t of(const torch::optim::Optimizer& optimizer) {
    const float below_half = 0.5F - optimizer.state().max_load_factor();
    const bool is_ours = below_half > 0.F && below_half <= static_cast<float>(count) * spacing;
    return is_ours ? static_cast<uint32_t>(below_half / spacing) : 0;
  }

  /// Gives it one, if it has none.
  static uint32_t give(torch::optim::Optimizer& optimizer) {
    static std::atomic<uint32_t> last = 0;
    if (of(optimizer) == 0) {
      const uint32_t number = last++ % count + 1;
      optimizer.state().max_load_factor(0.5F - static_cast<float>(number) * spacing);
    }
    return of(optimizer);
  }

 private:
  static constexpr float spacing = 0x1p-25F;  // of fp32 numbers just below 1/2
  static constexpr uint32_t count = 1U << 21;
};

}  // namespace torchamp::detail
