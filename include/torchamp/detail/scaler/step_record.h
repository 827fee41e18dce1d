// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "torchamp/detail/scaler/found_inf.h"
#include "torchamp/missing_gradients.h"

namespace torchamp::detail {

/// A number that the host knows or that a 0-dim tensor holds.
struct LazyNumber {
  at::Tensor tensor;
  std::optional<double> on_host;

  double read() {
    if (!on_host) on_host = tensor.item<double>();
    return *on_host;
  }
  /// Makes a later change of the tensor invisible.
  void keep() {
    if (!on_host) tensor = tensor.clone();
  }
};

/// What a StepResult answers from; shared by its copies.
struct StepRecord {
  FoundInf found_inf;
  bool had_gradients = true;
  LazyNumber scale;         ///< what the gradients were scaled by
  LazyNumber skips_before;  ///< bad iterations in a row before this one
  at::Tensor value;         ///< what the optimizer's step returned
  std::vector<MissingGradient> missing;
  int64_t attempts = 1;  ///< evaluations of the first loss, for closures
};

}  // namespace torchamp::detail
