// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief WeightCache: how long casts of weights are kept, and what the cache must be told.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cstdint>

#include "torchamp/detail/weights/derived.h"
#include "torchamp/detail/weights/store.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// How long casts of weights to 16 bits are kept (AutocastOptions::cache).
///
/// `none` and `libtorch` are torch.autocast's `cache_enabled`. LibTorch's cache knows a weight by
/// its identity alone, and holds one cast of it, within one autograd graph.
///
/// The others are torchamp's own cache. It keeps values by tensor, memory, part of it and dtype,
/// and asks LibTorch's version counter whether they still hold: a weight that has not changed is
/// not cast again, in the next micro-batch, in evaluation, on another thread; one that has is cast
/// into the same memory, unless somebody still holds the old cast. Each use gets its own place in
/// the graph, so values and gradients are bit for bit those of casts made for each use. It also
/// takes views of weights, as the `w.t()` of torch::nn::Linear, and frozen weights. Ops that
/// LibTorch's own kernels would cast for run through an overlay, which costs about 0.2 µs a call,
/// as long as the process lives. What is kept of weights that are gone is freed at the end of the
/// next outermost guard, in the next step of a GradScaler or of a fused optimizer, and by
/// weight_cache_stats() and clear_weight_cache(), whichever comes first.
///
/// What writes to weights without LibTorch's counting has to tell: see weights_changed().
enum class WeightCache : std::uint8_t {
  none,      ///< not at all
  libtorch,  ///< by LibTorch, until the outermost guard ends
  region,    ///< by torchamp, until the outermost guard ends
  window,    ///< by torchamp, until a step of a GradScaler or of a fused optimizer: for the
             ///< micro-batches of an accumulation
  kept,      ///< by torchamp, until the weight is gone, or clear_weight_cache()
};

/// What torchamp's own cache of weights has done in this process.
struct WeightCacheStats {
  int64_t hits = 0;    ///< casts, and other forms of weights, that were found
  int64_t misses = 0;  ///< those that were made
  int64_t bytes = 0;   ///< kept now
};

/// Forgets the casts of weights that LibTorch keeps until the outermost guard ends, and all that
/// torchamp's own cache holds. Call it after writing to a weight in place inside a region, by a
/// plain optimizer's own step, say (steps of a GradScaler or of a fused optimizer do so
/// themselves): LibTorch's cache knows a weight by its identity and would go on giving the cast of
/// its old values. All threads share the caches; any may call this at any time, since what is
/// dropped is cast again.
inline void clear_weight_cache() {
  at::autocast::clear_cache();
  detail::derived_weights().clear();
}

/// Tells that any weight may have other values now. Call it after writes that LibTorch does not
/// count, while torchamp's own cache is in use: through `.data()` (as LibTorch's own SGD does in
/// steps that no GradScaler makes) or a pointer, through another tensor that was given the weight's
/// memory and is no view of it, by a kernel of your own, by a graph that something other than a
/// CudaGraph replays. Any thread; reads no device.
inline void weights_changed() {
  at::autocast::clear_cache();
  detail::derived_weights().all_changed();
}

/// Tells the same of these weights only, and of all that shares their memory.
inline void weights_changed(at::TensorList weights) {
  at::autocast::clear_cache();
  detail::derived_weights().changed(weights);
}

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
