// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/cpu/Utils.h>
#include <c10/core/ScalarType.h>
#include <torch/version.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace support {

/// Whether ONEDNN_MAX_CPU_ISA keeps oneDNN from instructions for 16-bit products.
inline bool onednn_is_held_back() {
  const char* const isa = std::getenv("ONEDNN_MAX_CPU_ISA");
  const std::string most = isa == nullptr ? "" : isa;
  return most == "SSE41" || most.starts_with("AVX2") || most == "AVX" || most == "AVX512_CORE" ||
         most == "AVX512_CORE_VNNI";
}

/// The instruction sets of this CPU that multiply matrices in `dtype` (fp16 or bf16) at full speed,
/// by LibTorch's names; none: LibTorch's products take many times as long as those in fp32.
inline std::vector<std::string> fast_matmul_units(c10::ScalarType dtype) {
  if (onednn_is_held_back()) return {};
  std::vector<std::string> found;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const std::vector<std::string> candidates =
      dtype == c10::kBFloat16
          ? std::vector<std::string>{"amx_bf16", "avx512_bf16", "sve_bf16", "bf16"}
          : std::vector<std::string>{"amx_fp16", "avx512_fp16", "fp16_arith"};
  for (const std::string& name : candidates) {
    const auto entry = capabilities.find(name);
    if (entry != capabilities.end() && entry->second.isBool() && entry->second.toBool()) {
      found.push_back(name);
    }
  }
#else  // has no table of them
  if (dtype == c10::kBFloat16 && at::cpu::is_avx512_bf16_supported()) found = {"avx512_bf16"};
  if (dtype == c10::kHalf && at::cpu::is_amx_fp16_supported()) found = {"amx_fp16"};
#endif
  return found;
}

/// The CPU's name, as far as it and LibTorch (2.11 and newer) tell.
inline std::string cpu_name() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto entry = capabilities.find("cpu_name");
  if (entry != capabilities.end() && entry->second.isString()) return entry->second.toStringRef();
#endif
  return "this CPU";
}

}  // namespace support
