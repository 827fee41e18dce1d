// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <memory>

#include "torchamp/detail/gradients/deferred_clip.h"
#include "torchamp/detail/scaler/step_record.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// What both kinds of accumulation do.

/// Drops the gradients, and a clip of them that is left to the next step.
inline void clear_gradients(torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  ClipLeft::forget(optimizer);
}

inline std::shared_ptr<AccumulationWindow> open_window(torch::optim::Optimizer& optimizer) {
  return std::make_shared<AccumulationWindow>(
      AccumulationWindow{.optimizer = OptimizerNumber::give(optimizer)});
}

/// A warning out of a destructor.
template <class... Parts>
void warn(const Parts&... parts) noexcept {
  try {
    TORCH_WARN(parts...);
  } catch (...) {  // by the program's handler
  }
}

}  // namespace torchamp::detail
