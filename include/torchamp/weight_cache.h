// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief torchamp's own cache of casts of weights: WeightCache::region, window and kept.

#include <c10/util/Exception.h>

#include <cstdint>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/weights/casts.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/version.h"

/// @file
/// WeightCache::region, window and kept replace LibTorch's cache of casts in a guard. Values are
/// stored by tensor, memory, part of it and dtype, and are valid while LibTorch's version counter
/// is unchanged: an unchanged weight is not cast again, in the next micro-batch, in evaluation or
/// on another thread; a changed one is cast into the same memory, unless the old cast is still in
/// use. Each use gets its own place in the graph, so values and gradients equal, bit for bit, those
/// of a new cast for each use. Frozen weights and views of weights, as the `w.t()` of
/// torch::nn::Linear, are cached, too. Ops that LibTorch's own kernels would cast for run through
/// an overlay, which costs about 0.2 µs per call for the rest of the process. Casts of destroyed
/// weights are freed at the end of the next outermost guard, by the next step of a GradScaler or of
/// a fused optimizer, or by weight_cache_stats() or clear_weight_cache().

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

/// Statistics of torchamp's own cache, for the process.
struct WeightCacheStats {
  int64_t hits = 0;    ///< casts, and 8-bit forms, that were found
  int64_t misses = 0;  ///< that were made
  int64_t bytes = 0;   ///< in use now
};

/// Limits torchamp's own cache to this many bytes, for the process; the least recently used entries
/// are freed first. There is no limit at first. Error: a negative number.
inline void set_weight_cache_budget(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_weight_cache_budget: ", bytes,
                    " bytes is not a budget. Pass 0 or more.");
  detail::derived_weights().set_budget(bytes);
}

/// Returns the statistics, and frees the casts of destroyed weights. Any thread.
inline WeightCacheStats weight_cache_stats() {
  detail::derived_weights().drop_gone();
  const auto counts = detail::derived_weights().counts();
  return {counts.hits, counts.misses, counts.bytes};
}

}  // namespace TORCHAMP_NAMESPACE
