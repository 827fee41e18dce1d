// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/cpu/Utils.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "torchamp/detail/libtorch.h"

namespace torchamp::detail {

inline bool cpu_has_bf16_units() {
#if TORCHAMP_LIBTORCH >= 211
  const auto capabilities = at::cpu::get_cpu_capabilities();
  constexpr std::array units{"amx_bf16", "avx512_bf16", "sve_bf16", "bf16"};
  return std::ranges::any_of(units, [&](const char* unit) {
    const auto found = capabilities.find(unit);
    return found != capabilities.end() && found->second.isBool() && found->second.toBool();
  });
#else
  return at::cpu::is_avx512_bf16_supported() || at::cpu::is_amx_tile_supported();
#endif
}

/// Whether oneDNN multiplies matrices in bf16 at full speed; ONEDNN_MAX_CPU_ISA may prevent that.
inline bool has_fast_bf16() {
  constexpr std::array slow{"SSE41", "AVX", "AVX512_CORE", "AVX512_CORE_VNNI"};
  const char* const isa = std::getenv("ONEDNN_MAX_CPU_ISA");
  const std::string_view most = isa ? isa : "";
  if (most.starts_with("AVX2") || std::ranges::find(slow, most) != slow.end()) return false;
  return cpu_has_bf16_units();
}

/// The dtype of a region on `device` where none is asked for; fp32: none.
inline at::ScalarType default_dtype(at::DeviceType device, bool fast_bf16) {
  if (device == at::kCUDA) return at::kHalf;
  if (device != at::kCPU) return at::autocast::get_autocast_dtype(device);
  return fast_bf16 ? at::kBFloat16 : at::kFloat;
}

/// The same for this machine. Says once that a CPU trains in fp32.
inline at::ScalarType default_dtype(at::DeviceType device) {
  const at::ScalarType dtype = default_dtype(device, device == at::kCPU && has_fast_bf16());
  if (dtype == at::kFloat) {
    TORCH_WARN_ONCE(
        "TrainingStep: this CPU has no fast bf16 (avx512_bf16, AMX), so it trains in fp32. Set "
        ".dtype = torch::kBFloat16 to train in bf16 all the same, or torch::kFloat to say so.");
  }
  return dtype;
}

}  // namespace torchamp::detail
