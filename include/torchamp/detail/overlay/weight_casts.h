// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Lives where weights are written to, and drops LibTorch's cached casts of them at its end, also
/// if what writes throws: within an autocast region, an op after it would compute with the old
/// values. What is dropped is cast again.
class DropWeightCasts {
 public:
  DropWeightCasts() = default;
  ~DropWeightCasts() { at::autocast::clear_cache(); }
  DropWeightCasts(const DropWeightCasts&) = delete;
  DropWeightCasts& operator=(const DropWeightCasts&) = delete;
};

}  // namespace torchamp::detail
