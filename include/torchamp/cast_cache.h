// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. WeightCache: how long casts of weights are cached, and how to invalidate them.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {
/// The number of NoCastCaches (torchamp/autocast_state.h) that live on the calling thread.
inline thread_local int no_cast_caches = 0;

/// Switches LibTorch's cache of cast weights on or off; it stays off while a NoCastCache lives.
/// Guards call this function at their begin and end, and set the flag in no other way.
inline void set_cast_cache(bool enabled) {
  at::autocast::set_autocast_cache_enabled(enabled && no_cast_caches == 0);
}

/// A scope that begins with an empty cache of LibTorch's weight casts, and ends with an empty one:
/// casts in the scope are part of the scope's autograd graph.
class EmptyCastCache {
 public:
  EmptyCastCache() { at::autocast::clear_cache(); }
  ~EmptyCastCache() { at::autocast::clear_cache(); }
  EmptyCastCache(const EmptyCastCache&) = delete;
  EmptyCastCache& operator=(const EmptyCastCache&) = delete;
};
}  // namespace detail

// Note [Who clears LibTorch's cache of casts]
// LibTorch's cache finds a cast by the weight's tensor object alone. It compares neither the values
// nor the 16-bit dtype nor the autograd graph. So torchamp clears it (at::autocast::clear_cache)
//  - at the end of the outermost guard, as by torch.autocast: AutocastRegion, AutocastStateGuard;
//  - at both ends of a guard whose dtype differs from the dtype around it: by the same two classes.
//    An outermost AutocastRegion clears it at its end only, because the previous region has left it
//    empty;
//  - after weights are written: DropWeightCasts after a step, even if the step throws; ops in place
//    in a region, see Note [Writes in a region]; the functions below, which the program calls;
//    custom functions that write in place;
//  - if casts belong to one autograd graph or capture and to no other: EmptyCastCache, at both
//    ends.
// A NoCastCache bypasses the cache if casts of other threads must stay in it. torchamp's own cache
// compares the versions of the weights; writes that no version counts are reported to it through
// KeptWeights.

/// How long casts of weights to 16 bits are cached (AutocastOptions::cache).
///
/// `none` and `libtorch` are `cache_enabled=False` and `cache_enabled=True` of torch.autocast.
/// LibTorch's cache identifies a weight by its tensor object alone, and holds one cast of the
/// weight, in one autograd graph. `region`, `window` and `kept` are torchamp's own cache, which
/// casts a weight again after the weight has changed: see torchamp/weight_cache.h. If no source
/// file includes that header, a guard with `window` or `kept` throws, and `region` is the same as
/// `libtorch`.
///
/// LibTorch counts most writes to a tensor in the tensor's version. After other writes to weights,
/// call weights_changed(), whose comment lists them.
class WeightCache {
 public:
  /// No cache.
  static const WeightCache none;
  /// LibTorch's cache, until the outermost guard ends.
  static const WeightCache libtorch;
  /// torchamp's cache, until the outermost guard ends.
  static const WeightCache region;
  /// torchamp's cache, until a step of a GradScaler or of a fused optimizer: for the micro-batches
  /// of an accumulation.
  static const WeightCache window;
  /// torchamp's cache, until the weight is destroyed or clear_weight_cache() is called.
  static const WeightCache kept;

  /// Equal if they cache casts for the same time, in the same cache.
  bool operator==(const WeightCache&) const = default;

  /// For the library's own headers: how long casts are kept, and where the object that casts
  /// weights is registered; null: LibTorch casts them.
  constexpr WeightCache(detail::WeightKeep::Until until, const detail::WeightCasts* const* casts)
      : until_(until), casts_(casts) {}
  /// For the library's own headers: how long casts are kept.
  constexpr detail::WeightKeep::Until until() const { return until_; }
  /// For the library's own headers: who casts weights; null: LibTorch.
  const detail::WeightCasts* casts() const { return casts_ ? *casts_ : nullptr; }

 private:
  detail::WeightKeep::Until until_;
  const detail::WeightCasts* const* casts_;
};

inline constexpr WeightCache WeightCache::none{detail::WeightKeep::Until::not_kept, nullptr};
inline constexpr WeightCache WeightCache::libtorch{detail::WeightKeep::Until::region_ends, nullptr};
inline constexpr WeightCache WeightCache::region{detail::WeightKeep::Until::region_ends,
                                                 &detail::registered_weight_casts};
inline constexpr WeightCache WeightCache::window{detail::WeightKeep::Until::weights_step,
                                                 &detail::registered_weight_casts};
inline constexpr WeightCache WeightCache::kept{detail::WeightKeep::Until::dropped,
                                               &detail::registered_weight_casts};

/// Drops all cached casts of weights, in LibTorch's cache and in torchamp's own. If you write to a
/// weight inside a region through a pointer, by set_data() or by a custom op, call this function or
/// weights_changed(): otherwise LibTorch's cache returns the cast of the old values. In a region,
/// steps of optimizers and LibTorch's ops in place need no call; for writes outside, see
/// weights_changed(). All threads share the caches; any thread may call this at any time. Never
/// synchronises.
inline void clear_weight_cache() {
  at::autocast::clear_cache();
  if (auto* const kept = detail::kept_weights()) kept->clear();
}

/// Clears LibTorch's cache, and marks all casts in torchamp's own cache as stale: the next use of a
/// weight casts it again. If torchamp's own cache is in use, call this function after writes that
/// LibTorch does not count:
///  - through `.data()`. No call is needed for LibTorch's ops in place in a region. LibTorch's own
///    SGD also writes through `.data()`; if a GradScaler takes its step, no call is needed;
///  - through a pointer;
///  - through a tensor that is not a view of the weight, but uses the weight's present or former
///    memory;
///  - by a custom kernel, or an op such as `_fused_adam_`;
///  - by a graph other than a CudaGraph's.
///
/// If a weight uses only a part of its storage, for example after
/// torch::nn::utils::vector_to_parameters(), torchamp's own cache stores no casts of it, and no
/// call is needed. Any thread; never synchronises.
inline void weights_changed() {
  at::autocast::clear_cache();
  if (auto* const kept = detail::kept_weights()) kept->all_changed();
}

/// Clears LibTorch's cache. In torchamp's own cache, marks the casts of `weights`, and of all
/// tensors that share memory with them, as stale. Any thread; never synchronises.
inline void weights_changed(at::TensorList weights) {
  at::autocast::clear_cache();
  if (auto* const kept = detail::kept_weights()) kept->changed(weights);
}

}  // namespace TORCHAMP_NAMESPACE
