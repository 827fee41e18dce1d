// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include "torchamp/detail/core/optim/adagrad_kernel.h"  // IWYU pragma: export
#include "torchamp/detail/core/optim/adam_kernels.h"    // IWYU pragma: export
#include "torchamp/detail/core/optim/kernel.h"          // IWYU pragma: export
#include "torchamp/detail/core/optim/muon_kernel.h"     // IWYU pragma: export
#include "torchamp/detail/core/optim/sgd_kernel.h"      // IWYU pragma: export

namespace TORCHAMP_NAMESPACE::detail {

/// The names of the fused optimizers.
template <class... Kernels>
struct KernelNames {
  /// For error texts: "FusedAdam, FusedAdamW or FusedSGD". `elementwise_only`: only optimizers that
  /// treat each element independently.
  static std::string text(bool elementwise_only = false) {
    std::string names, last;
    const auto add = [&](const char* name, bool is_elementwise) {
      if (elementwise_only && !is_elementwise) return;
      if (!last.empty()) names += (names.empty() ? "" : ", ") + last;
      last = name;
    };
    (add(Kernels::name, Kernels::elementwise), ...);
    return names + " or " + last;
  }

  /// The name of the optimizer whose options have `has(option)`; empty if it is none that LibTorch
  /// lacks.
  template <class Has>
  static std::string of_options(const Has& has) {
    std::string found;
    const auto look = [&]<class Kernel>(const Kernel*) {
      if constexpr (requires { Kernel::LibTorch::only_option; }) {
        if (has(Kernel::LibTorch::only_option)) found = Kernel::name;
      }
    };
    (look(static_cast<const Kernels*>(nullptr)), ...);
    return found;
  }
};
using FusedNames = KernelNames<AdamKernel, AdamWKernel, SgdKernel, AdagradKernel, MuonKernel>;

}  // namespace TORCHAMP_NAMESPACE::detail

/// With TORCHAMP_COMPILED, compiled.h defines these templates for all programs, and optim.h
/// declares them: `define` is `template` or `extern template`.
// NOLINTBEGIN(bugprone-macro-parentheses): `define` is no expression
#define TORCHAMP_FUSED_OPTIMIZERS(define)               \
  define class FusedOptimizerOf<detail::AdamKernel>;    \
  define class FusedOptimizerOf<detail::AdamWKernel>;   \
  define class FusedOptimizerOf<detail::SgdKernel>;     \
  define class FusedOptimizerOf<detail::AdagradKernel>; \
  define class FusedOptimizerOf<detail::MuonKernel>;
// NOLINTEND(bugprone-macro-parentheses)
