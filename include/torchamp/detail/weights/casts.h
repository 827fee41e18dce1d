// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <string_view>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/kernel.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/weights/cast.h"
#include "torchamp/detail/weights/derived.h"

namespace torchamp::detail {

/// Makes overlays see the ops that LibTorch's own kernels for the device cast to 16 bits.
inline void install_overlays_of_natively_lowered(at::DeviceType device) {
  const auto install = [&](std::string_view name) {
    for (const auto& op : find_ops(name, "WeightCache", /*missing_ok=*/true)) {
      if (lowers_natively(op, device)) (void)install_overlay(op, device);
    }
  };
  if (device == at::kCPU) {
    for (const std::string_view name : cpu_lower_precision_ops) install(name);
  } else {
    for (const ListedRule& rule : libtorch_cuda_lists) install(rule.op());
    for (const std::string_view name : cuda_lower_precision_ops) install(name);
  }
}

/// Takes casts of weights from the store.
class StoredWeightCasts final : public WeightCasts {
 public:
  void prepare(at::DeviceType device) const override {
    static std::array<std::once_flag, device_count> prepared;
    std::call_once(prepared[device_index(device, "WeightCache")], [&] {
      install_overlays_of_natively_lowered(device);
      (void)derived_weights();
    });
  }

  void cast(const c10::FunctionSchema& schema, const std::vector<std::size_t>& positions,
            at::ScalarType dtype, at::DeviceType device, torch::jit::Stack& stack) const override {
    const WeightKeep keep = keep_of_this_thread();
    if (keep.until == WeightKeep::Until::made) return;
    const std::size_t first = stack.size() - schema.arguments().size();
    // Of what is added in place, only a parameter is a weight for sure.
    const bool in_place = schema.name().ends_with('_');
    for (const std::size_t position : positions) {
      c10::IValue& value = stack[first + position];
      value = with_tensors_changed(value, [&](const at::Tensor& tensor) {
        const bool takes =
            at::autocast::is_eligible(tensor, device) && tensor.scalar_type() != dtype &&
            is_weight(tensor, in_place ? WeightPlace::none
                                       : place_of_weight(schema.arguments()[position].name()));
        return takes ? kept_cast(derived_weights(), tensor, dtype, keep) : tensor;
      });
    }
  }
};

inline const StoredWeightCasts& stored_weight_casts() {
  static const auto& casts = *new StoredWeightCasts;  // never destroyed: threads point to it
  return casts;
}

}  // namespace torchamp::detail
