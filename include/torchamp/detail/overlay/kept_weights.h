// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/version.h"

namespace at {
class Tensor;
using TensorList = c10::ArrayRef<Tensor>;
}  // namespace at

namespace torchamp::detail {

// Note [Weights that are kept]
// LibTorch keeps casts of weights for a region. To keep more, or for longer, is an extra: casts
// (torchamp/weight_cache.h) and 8-bit forms (torchamp/fp8.h) lie in one store a process, which the
// first of them makes (detail/weights/store.h). The core knows the store as KeptWeights, to which
// it tells what happens, and who casts weights for a region as WeightCasts. Both are null in a
// program without these extras.

/// How long something that was made of a weight is kept.
struct WeightKeep {
  enum class Until : std::uint8_t {
    made,          ///< not at all
    region_ends,   ///< the outermost guard's end
    weights_step,  ///< the next step of any optimizer that the library sees
    told,          ///< until the program drops it, or the weight is gone
  };
  Until until = Until::made;
  std::uint64_t region = 0;  ///< that of the outermost guard; 0 if it began before the store
};

/// What is kept of weights, as far as others tell it what happens. Any thread.
class KeptWeights {
 public:
  KeptWeights() = default;
  KeptWeights(const KeptWeights&) = delete;
  KeptWeights& operator=(const KeptWeights&) = delete;

  /// The outermost guard begins; returns the region's number, which is not 0.
  virtual std::uint64_t begin_region() = 0;

  /// Drops what was kept for the region, and what belongs to weights that are gone. Nothing is kept
  /// for it any more, by threads that still have its state.
  virtual void end_region(std::uint64_t region) = 0;

  /// Drops what was kept until weights step.
  virtual void end_window() = 0;

  /// The weights, and what else looks at their memory, may have other values now, though LibTorch
  /// has not counted a write.
  virtual void changed(at::TensorList weights) = 0;

  /// Any weight may have other values now.
  virtual void all_changed() = 0;

  /// Drops all.
  virtual void clear() = 0;

 protected:
  ~KeptWeights() = default;
};

/// Who casts weights for a region instead of LibTorch. Immutable.
class WeightCasts {
 public:
  WeightCasts() = default;
  WeightCasts(const WeightCasts&) = delete;
  WeightCasts& operator=(const WeightCasts&) = delete;

  /// Before a region of a device: has overlays see all ops that cast to 16 bits.
  virtual void prepare(at::DeviceType device) const = 0;

  /// Casts, of the arguments at `positions`, those that are weights; they lie at the stack's end.
  virtual void cast(const c10::FunctionSchema& schema, const std::vector<std::size_t>& positions,
                    at::ScalarType dtype, at::DeviceType device,
                    torch::jit::Stack& stack) const = 0;

 protected:
  ~WeightCasts() = default;
};

/// Those of torchamp/weight_cache.h, which registers them; null where no source file includes that.
inline const WeightCasts*& registered_weight_casts() {
  static const WeightCasts* casts = nullptr;
  return casts;
}

}  // namespace torchamp::detail
