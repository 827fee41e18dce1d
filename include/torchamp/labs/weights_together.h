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

namespace torchamp::detail {

/// Has weights cast together: see Note [Weights cast together].
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

}  // namespace torchamp::detail

namespace TORCHAMP_NAMESPACE {

/// weights_together() leaves the casts to LibTorch's cache, for as long as that keeps them, but
/// makes them by few ops: a region casts up to 32 weights by one op if the last regions cast these
/// one after another, and backward casts their gradients by one op. Values and gradients equal,
/// bitwise, those with LibTorch's cache; the order of the sum may differ where a weight's gradient
/// is a sum of three or more, from casts of it, of views of it and from ops in fp32. A weight may
/// be cast before its first use in a region, so call weights_changed() after a write within the
/// region that LibTorch does not count. A gradient hook that is registered between forward and
/// backward may get an undefined gradient. No gradient comes to a `w.t()` that the program keeps,
/// but to `w`. A weight of ops that a policy's predicate decides about, and of others, has two
/// casts. Only the other caches have statistics and a budget.
inline WeightCache weights_together() {
  return {detail::WeightKeep::Until::region_ends, &detail::casts_together};
}

}  // namespace TORCHAMP_NAMESPACE
