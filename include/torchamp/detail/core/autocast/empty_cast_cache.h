// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// A region that begins with an empty cache of LibTorch's weight casts, and whose casts nobody
/// finds after it: they are part of its autograd graph.
class EmptyCastCache {
 public:
  EmptyCastCache() { at::autocast::clear_cache(); }
  ~EmptyCastCache() { at::autocast::clear_cache(); }
  EmptyCastCache(const EmptyCastCache&) = delete;
  EmptyCastCache& operator=(const EmptyCastCache&) = delete;
};

}  // namespace torchamp::detail
