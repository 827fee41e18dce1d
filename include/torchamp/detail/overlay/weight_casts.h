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

/// A region that begins with an empty cache of weight casts, and whose casts nobody finds after it.
class EmptyCastCache {
 public:
  EmptyCastCache() { at::autocast::clear_cache(); }
  ~EmptyCastCache() { at::autocast::clear_cache(); }
  EmptyCastCache(const EmptyCastCache&) = delete;
  EmptyCastCache& operator=(const EmptyCastCache&) = delete;
};

}  // namespace torchamp::detail
