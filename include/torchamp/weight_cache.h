// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. torchamp's own cache of casts of weights: WeightCache::region, window and kept.

#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/weights/cast.h"
#include "torchamp/detail/extras/weights/derived.h"
#include "torchamp/detail/extras/weights/weight_stamp.h"
#include "torchamp/version.h"

/// @file
/// WeightCache::region, window and kept replace LibTorch's cache of casts in a guard. The
/// cache finds a cast by the weight's tensor (for a view its base), the weight's memory, the part
/// of this memory that the weight uses, and the dtype. A cast is valid while LibTorch's version
/// counter of the weight is unchanged. So an unchanged weight is not cast again, in the next
/// micro-batch, in evaluation or on another thread. A changed weight is cast again into the same
/// memory, unless the old cast is still in use.
///
/// Each use of a cast is a separate node of the autograd graph: values and gradients are bitwise
/// identical to the results with a new cast for each use. Frozen weights and views of weights, like
/// the `w.t()` of torch::nn::Linear, are also cached. Ops that LibTorch's own kernels would cast
/// run through a kernel of torchamp, which costs about 0.2 µs per call for the rest of the process.
///
/// Casts of destroyed weights are freed at the end of the next outermost guard, by the next step of
/// a GradScaler or of a fused optimizer, by weight_cache_stats() and by clear_weight_cache(). In a
/// long region they are also freed each time that the number or the bytes of the stored casts have
/// doubled.

namespace TORCHAMP_NAMESPACE::detail {

/// Registers kernels of the ops that LibTorch's own kernels for the device cast to 16 bits. Only
/// the first call for a device has an effect.
inline void register_kernels_of_natively_lowered(at::DeviceType device) {
  static std::array<std::once_flag, device_count> registered;
  std::call_once(registered[device_index(device, "WeightCache")], [device] {
    const auto install = [&](std::string_view name) {
      for (const auto& op : find_ops(name, "WeightCache", /*missing_ok=*/true)) {
        if (lowers_natively(op, device)) (void)register_kernel(op, device);
      }
    };
    if (!facts_of(device).follows_cuda_lists) {
      for (const std::string_view name : cpu_lower_precision_ops) install(name);
    } else {
      for (const Row& row : cuda_rows) {
        for (const std::string_view name : row.family) install(op_in(name));
      }
      for (const std::string_view name : cuda_lower_precision_ops) install(name);
    }
  });
}

/// Changes each defined tensor among a call's arguments at `positions` to what
/// `changed(tensor, position)` returns.
template <class Function>
void change_arguments(const c10::FunctionSchema& schema, const std::vector<std::size_t>& positions,
                      torch::jit::Stack& stack, const Function& changed) {
  const std::size_t first = stack.size() - schema.arguments().size();
  for (const std::size_t position : positions) {
    c10::IValue& value = stack[first + position];
    value = with_tensors_changed(
        value, [&](const at::Tensor& tensor) { return changed(tensor, position); });
  }
}

/// Whether the JIT traces the calling thread. A trace must contain the cast of a weight: a cached
/// cast would be a constant in it.
inline bool is_traced() {
  return at::tracer::impl::is_dispatch_enabled();
}

/// Takes casts of weights from the store.
class StoredWeightCasts final : public WeightCasts {
 public:
  void prepare(at::DeviceType device) const override {
    register_kernels_of_natively_lowered(device);
    (void)derived_weights();
  }

  void cast(const c10::FunctionSchema& schema, const std::vector<std::size_t>& positions,
            at::ScalarType dtype, at::DeviceType device, torch::jit::Stack& stack) const override {
    const WeightKeep keep = keep_of_this_thread();
    if (keep.until == WeightKeep::Until::not_kept || is_traced()) return;
    // An op in place may add activations. Only a parameter is certainly a weight.
    const bool in_place = schema.name().ends_with('_');
    const auto cast_of = [&](const at::Tensor& tensor, std::size_t position) {
      const bool takes =
          at::autocast::is_eligible(tensor, device) && tensor.scalar_type() != dtype &&
          !has_tangent(tensor) &&
          is_weight(tensor, in_place ? std::string_view() : schema.arguments()[position].name());
      return takes ? kept_cast(derived_weights(), tensor, dtype, keep) : tensor;
    };
    change_arguments(schema, positions, stack, cast_of);
  }

  bool uses_libtorch_cache() const override { return false; }
};

inline const bool weight_casts_are_registered = [] {
  registered_weight_casts = new StoredWeightCasts;  // never destroyed: threads point to them
  return true;
}();

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

/// Statistics of torchamp's own cache, for the process since its start.
struct WeightCacheStats {
  int64_t hits = 0;    ///< casts, and 8-bit forms, that were in the cache
  int64_t misses = 0;  ///< casts, and 8-bit forms, that were made
  int64_t bytes = 0;   ///< bytes in use now
};

/// Limits torchamp's own cache to this many bytes, for the whole process. This call, and each later
/// cast that does not fit, frees the least recently used entries until the limit is met. Without a
/// call there is no limit. Any thread. Error: a negative number.
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
