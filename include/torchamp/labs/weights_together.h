// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. weights_together(): a WeightCache that casts weights by few ops.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/labs/detail/weights/together.h"
#include "torchamp/version.h"
#include "torchamp/weight_cache.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Casts weights in groups: see Note [Weights cast together].
class CastsTogether final : public WeightCasts {
 public:
  void prepare(at::DeviceType device) const override {
    register_kernels_of_natively_lowered(device);
  }

  void cast(const c10::FunctionSchema& schema, const std::vector<std::size_t>& positions,
            at::ScalarType dtype, at::DeviceType device, torch::jit::Stack& stack) const override {
    if (!at::autocast::is_autocast_cache_enabled() || is_traced() ||
        dtype != at::autocast::get_autocast_dtype(device)) {
      return;
    }
    std::optional<CastPoolHandle> handle;
    const auto cast_of = [&](const at::Tensor& tensor, std::size_t /*position*/) {
      const WeightUse use = weight_use(tensor, device);
      if (!use.weight.defined()) return tensor;
      if (!handle) handle = cast_pool(use.weight.device(), dtype);
      const at::Tensor cast = handle->pool->cast(use, dtype);
      return cast.defined() ? cast : tensor;
    };
    change_arguments(schema, positions, stack, cast_of);
  }

  bool uses_libtorch_cache() const override { return true; }
};

inline const WeightCasts* const casts_together = new CastsTogether;  // never destroyed

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

/// Returns a WeightCache that casts weights in groups. Casts are stored in LibTorch's cache, as
/// long as with WeightCache::libtorch. torchamp records in which order regions cast their weights.
/// In later regions one op casts up to 32 such weights, and in backward one op casts their
/// gradients. Values and gradients are bitwise identical to LibTorch's cache. Exception: if a
/// weight's gradient is a sum of three or more terms (from its casts, from casts of its views and
/// from ops in fp32), the order of the sum may differ.
///
/// A weight may be cast before its first use in a region. So call weights_changed() after a write
/// in the region that LibTorch does not count. A gradient hook that is registered between forward
/// and backward may get an undefined gradient. If the program stores a `w.t()`, no gradient reaches
/// it: the gradient goes directly to `w`. If a rule with a predicate lets LibTorch's kernel run a
/// call, LibTorch casts the weight for this call. If other ops also use the weight, it is cast
/// twice. This cache has no statistics and no budget. Several threads may use it at once: each
/// thread records its own order, and casts separately.
inline WeightCache weights_together() {
  return {detail::WeightKeep::Until::region_ends, &detail::casts_together};
}

}  // namespace TORCHAMP_NAMESPACE
