// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include "torchamp/detail/core/optim/adagrad_kernel.h"  // IWYU pragma: export
#include "torchamp/detail/core/optim/adam_kernels.h"    // IWYU pragma: export
#include "torchamp/detail/core/optim/kernel.h"          // IWYU pragma: export
#include "torchamp/detail/core/optim/muon_kernel.h"     // IWYU pragma: export
#include "torchamp/detail/core/optim/option_names.h"
#include "torchamp/detail/core/optim/sgd_kernel.h"  // IWYU pragma: export
#include "torchamp/detail/core/optim/stored_fields.h"

/// The list of the fused optimizers: calls the macro `f` with each kernel.
#define TORCHAMP_FOR_EACH_KERNEL(f) \
  f(AdamKernel) f(AdamWKernel) f(SgdKernel) f(AdagradKernel) f(MuonKernel)

namespace TORCHAMP_NAMESPACE::detail {

/// The names of the fused optimizers. The first type is not a kernel.
template <class, class... Kernels>
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

  /// The name of the optimizer that LibTorch lacks and whose options have these names; empty if
  /// there is none.
  static std::string of_options(const OptionNames& names) {
    std::string found;
    const auto look = [&]<class Kernel>(const Kernel*) {
      if constexpr (HasFields<typename Kernel::Options>) {
        if (names == option_names<typename Kernel::Options>()) found = Kernel::name;
      }
    };
    (look(static_cast<const Kernels*>(nullptr)), ...);
    return found;
  }
};

#define TORCHAMP_NEXT_KERNEL(kernel) , kernel
using FusedNames = KernelNames<void TORCHAMP_FOR_EACH_KERNEL(TORCHAMP_NEXT_KERNEL)>;
#undef TORCHAMP_NEXT_KERNEL

}  // namespace TORCHAMP_NAMESPACE::detail
