// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief WeightCache: how long casts of weights are kept, and what the cache must be told.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <concepts>

#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {
/// A WeightCache that needs torchamp/weight_cache.h.
struct LongWeightCache {
  WeightKeep::Until until;
};

/// What that header brings: see Note [Extras].
template <class LongCache>
struct LongWeightCacheExtra {
  static_assert(
      sizeof(LongCache) == 0,
      "torchamp: include torchamp/weight_cache.h, which has WeightCache::window and kept.");
};
/// While it lives, casts of the calling thread neither come from LibTorch's cache of cast weights,
/// which all threads share, nor go there; guards do not switch it on.
class NoCastCache {
 public:
  NoCastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
    ++depth;
  }
  NoCastCache(const NoCastCache&) = delete;
  NoCastCache& operator=(const NoCastCache&) = delete;
  ~NoCastCache() {
    --depth;
    at::autocast::set_autocast_cache_enabled(before_);
  }

  /// Sets LibTorch's flag, as far as it may be on.
  static void set_flag(bool enabled) {
    at::autocast::set_autocast_cache_enabled(enabled && depth == 0);
  }

 private:
  static inline thread_local int depth = 0;
  bool before_;
};
}  // namespace detail

/// How long casts of weights to 16 bits are kept (AutocastOptions::cache).
///
/// `none` and `libtorch` are torch.autocast's `cache_enabled`. LibTorch's cache knows a weight by
/// its identity alone, and holds one cast of it, within one autograd graph. The others are
/// torchamp's own cache: see torchamp/weight_cache.h, which `window` and `kept` need; without it
/// `region` is `libtorch`.
///
/// What writes to weights without LibTorch's counting has to tell: see weights_changed().
class WeightCache {
 public:
  /// Not at all.
  static const WeightCache none;
  /// By LibTorch, until the outermost guard ends.
  static const WeightCache libtorch;
  /// By torchamp, until the outermost guard ends.
  static const WeightCache region;
  /// By torchamp, until a step of a GradScaler or of a fused optimizer: for the micro-batches of an
  /// accumulation.
  static constexpr detail::LongWeightCache window{detail::WeightKeep::Until::weights_step};
  /// By torchamp, until the weight is gone, or clear_weight_cache().
  static constexpr detail::LongWeightCache kept{detail::WeightKeep::Until::told};

  /// `window` or `kept`.
  template <std::same_as<detail::LongWeightCache> LongCache>
  constexpr WeightCache(LongCache cache)
      : WeightCache(detail::LongWeightCacheExtra<LongCache>::until(cache), /*is_own=*/true) {}

  /// Equal when they keep casts as long, in the same cache.
  bool operator==(const WeightCache&) const = default;

  /// For the library's own headers: how long casts are kept.
  constexpr detail::WeightKeep::Until until() const { return until_; }
  /// For the library's own headers: who casts weights; null: LibTorch.
  const detail::WeightCasts* casts() const {
    return is_own_ ? detail::registered_weight_casts() : nullptr;
  }

 private:
  constexpr WeightCache(detail::WeightKeep::Until until, bool is_own)
      : until_(until), is_own_(is_own) {}

  detail::WeightKeep::Until until_;
  bool is_own_;
};

inline constexpr WeightCache WeightCache::none{detail::WeightKeep::Until::made, false};
inline constexpr WeightCache WeightCache::libtorch{detail::WeightKeep::Until::region_ends, false};
inline constexpr WeightCache WeightCache::region{detail::WeightKeep::Until::region_ends, true};

/// Forgets the casts of weights that LibTorch keeps until the outermost guard ends, and all that
/// torchamp's own cache holds. Call it after writing to a weight in place inside a region, by a
/// plain optimizer's own step, say (steps of a GradScaler or of a fused optimizer do so
/// themselves): LibTorch's cache knows a weight by its identity and would go on giving the cast of
/// its old values. All threads share the caches; any may call this at any time, since what is
/// dropped is cast again.
inline void clear_weight_cache() {
  at::autocast::clear_cache();
  if (auto* const kept = detail::kept_weights()) kept->clear();
}

/// Tells that any weight may have other values now. Call it after writes that LibTorch does not
/// count, while torchamp's own cache is in use: through `.data()` (as LibTorch's own SGD does in
/// steps that no GradScaler makes) or a pointer, through another tensor that was given the weight's
/// memory and is no view of it, by a kernel of your own or an op such as `_fused_adam_`, by a graph
/// that something other than a CudaGraph replays. Any thread; reads no device.
inline void weights_changed() {
  at::autocast::clear_cache();
  if (auto* const kept = detail::kept_weights()) kept->all_changed();
}

/// Tells the same of these weights only, and of all that shares their memory.
inline void weights_changed(at::TensorList weights) {
  at::autocast::clear_cache();
  if (auto* const kept = detail::kept_weights()) kept->changed(weights);
}

}  // namespace TORCHAMP_NAMESPACE
