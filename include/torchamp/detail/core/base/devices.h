// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/version.h>

#include "torchamp/version.h"

// What differs between versions: see .github/CONTRIBUTING.md, Versions of LibTorch.
/// @cond
/// The LibTorch that is compiled against: 215 for 2.15.
#define TORCHAMP_LIBTORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if TORCHAMP_LIBTORCH < 206
#error "torchamp needs LibTorch 2.6 or later."
#endif
/// @endcond

namespace TORCHAMP_NAMESPACE::detail {

/// fp16 or bf16.
inline bool is_16_bit(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

enum class Fp64 { unknown, yes, no };

/// Facts about a device type that cannot be queried from LibTorch. (Kernels, fused kernels and
/// pinned memory can.)
struct DeviceFacts {
  at::DeviceType type;
  bool (*is_built_in)() = nullptr;  ///< whether this LibTorch has it; null: if a backend is loaded
  /// Whether its own autocast kernels follow the lists in LibTorch's headers; else the CPU's.
  bool follows_cuda_lists = true;
  bool fp32_regions = false;   ///< whether autocast to fp32 is allowed, as in torch.autocast
  Fp64 fp64 = Fp64::unknown;   ///< whether it computes in fp64
  bool unscales_fp16 = true;   ///< whether ATen's kernel that unscales, if any, is right for fp16
  bool unscales_bf16 = false;  ///< the same for bf16
  bool fused = true;  ///< whether its fused optimizers, if any, heed the scale and the flag
};

// Note [MPS's kernels]
// Before LibTorch 2.13, MPS's kernel that unscales reads its fp32 factor as if it had the dtype of
// the gradients: if the scale is a power of two, 16-bit gradients become 0 (pytorch pull request
// 184286). MPS's fused optimizers ignore grad_scale and found_inf (186360). From 2.13 on they use
// both. torchamp still steps by ordinary ops on MPS, because the new kernels were not tested on a
// device.

/// Device types without a row have the defaults.
inline constexpr DeviceFacts device_facts[] = {
    {.type = at::kCPU,
     .is_built_in = [] { return true; },
     .follows_cuda_lists = false,
     .fp64 = Fp64::yes,
     .unscales_bf16 = true},
    {.type = at::kCUDA,
     .is_built_in = [] { return at::hasCUDA(); },
     .fp32_regions = true,
     .fp64 = Fp64::yes},
    {.type = at::kXPU, .is_built_in = [] { return at::hasXPU(); }, .fp64 = Fp64::no},  // some have
    {.type = at::kMPS,  // see Note [MPS's kernels]
     .is_built_in = [] { return at::hasMPS(); },
     .fp64 = Fp64::no,
     .unscales_fp16 = TORCHAMP_LIBTORCH >= 213,
     .fused = false},
    {.type = at::kHPU, .fp64 = Fp64::no},
    {.type = at::kMTIA, .fp64 = Fp64::no},
    {.type = at::kMAIA, .fp64 = Fp64::no},
    {.type = at::kPrivateUse1},
};

/// The facts of an external backend (kPrivateUse1) instead of its row, if not null. Set it before
/// the first guard or step, in each shared library that uses torchamp, to facts that stay.
inline const DeviceFacts* facts_of_own_backend = nullptr;

inline DeviceFacts facts_of(at::DeviceType type) {
  if (type == at::kPrivateUse1 && facts_of_own_backend) return *facts_of_own_backend;
  for (const DeviceFacts& facts : device_facts) {
    if (facts.type == type) return facts;
  }
  return {.type = type};
}

}  // namespace TORCHAMP_NAMESPACE::detail
