// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief torchamp's own cache of weights' casts: WeightCache::region, window and kept.

#include <c10/util/Exception.h>

#include <cstdint>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/weights/casts.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/version.h"

/// @file
/// WeightCache::region, window and kept replace LibTorch's cache of casts in a guard. They keep
/// values by tensor, memory, part of it and dtype, and ask LibTorch's version counter whether they
/// still hold: a weight that has not changed is not cast again, in the next micro-batch, in
/// evaluation, on another thread; one that has is cast into the same memory, unless somebody still
/// holds the old cast. Each use gets its own place in the graph, so values and gradients are bit
/// for bit those of casts made for each use. Views of weights are taken, too, as the `w.t()` of
/// torch::nn::Linear, and frozen weights. Ops that LibTorch's own kernels would cast for run
/// through an overlay, which costs about 0.2 µs a call, as long as the process lives. What is kept
/// of weights that are gone is freed at the end of the next outermost guard, in the next step of a
/// GradScaler or of a fused optimizer, and by weight_cache_stats() and clear_weight_cache(),
/// whichever comes first.

namespace TORCHAMP_NAMESPACE {

namespace detail {

template <>
struct LongWeightCacheExtra<LongWeightCache> {
  static constexpr WeightKeep::Until until(LongWeightCache cache) { return cache.until; }
};

inline const bool weight_casts_are_registered = [] {
  registered_weight_casts() = &stored_weight_casts();
  return true;
}();

}  // namespace detail

/// What torchamp's own cache of weights has done in this process.
struct WeightCacheStats {
  int64_t hits = 0;    ///< casts, and other forms of weights, that were found
  int64_t misses = 0;  ///< those that were made
  int64_t bytes = 0;   ///< kept now
};

/// Limits torchamp's own cache of weights to so many bytes, for the process; what was used least
/// recently leaves first. At first there is no limit. Error: a negative number.
inline void set_weight_cache_budget(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_weight_cache_budget: ", bytes,
                    " bytes are no budget. Pass 0 or more.");
  detail::derived_weights().set_budget(bytes);
}

/// Returns what torchamp's own cache of weights has done. Frees what it keeps of weights that are
/// gone. Any thread.
inline WeightCacheStats weight_cache_stats() {
  detail::derived_weights().drop_gone();
  const auto counts = detail::derived_weights().counts();
  return {counts.hits, counts.misses, counts.bytes};
}

}  // namespace TORCHAMP_NAMESPACE
