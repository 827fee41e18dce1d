// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/cpu/Utils.h>

#include <algorithm>
#include <array>
#include <string>

#include "torchamp/detail/core/base/devices.h"

#if TORCHAMP_LIBTORCH < 211 && defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace torchamp::detail {

/// Whether LibTorch's table of a CPU's units has some that multiply matrices in bf16. Arm's are
/// "bf16" and "sve_bf16".
template <class Capabilities>
bool has_bf16_units(const Capabilities& capabilities) {
  constexpr std::array units{"amx_bf16", "avx512_bf16", "sve_bf16", "bf16"};
  return std::ranges::any_of(units, [&](const char* unit) {
    const auto found = capabilities.find(unit);
    return found != capabilities.end() && found->second.isBool() && found->second.toBool();
  });
}

/// Whether this CPU has instructions for bf16 products.
inline bool cpu_has_bf16_units() {
#if TORCHAMP_LIBTORCH >= 211
  static const bool has_them = has_bf16_units(at::cpu::get_cpu_capabilities());
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long bf16 = 1UL << 14;  // HWCAP2_BF16
  static const bool has_them = (::getauxval(AT_HWCAP2) & bf16) != 0;
#elif defined(__aarch64__)
  static const bool has_them = false;  // unknown
#else
  static const bool has_them =
      at::cpu::is_avx512_bf16_supported() || at::cpu::is_amx_tile_supported();
#endif
  return has_them;
}

}  // namespace torchamp::detail
