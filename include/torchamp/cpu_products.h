// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. How a CPU computes products of 16-bit operands.

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// How a CPU computes products of operands in fp16 or bf16: matrix products, convolutions,
/// recurrent layers and the gradient of attention, forward and backward.
enum class CpuProducts : std::uint8_t {
  /// The faster of the two ways below, for each dtype. The first guard that needs the choice
  /// measures both ways.
  fastest,
  /// By LibTorch's kernels for 16 bits. On a CPU without instructions for such products they take 5
  /// to 100 times as long as in fp32. An LSTM throws if oneDNN has no LSTM in 16 bits for the CPU.
  libtorch,
  /// In fp32: operands are converted to fp32, LibTorch's kernel for fp32 runs, and its result is
  /// rounded once to 16 bits, as on a GPU. Products of a matrix and a vector still use LibTorch's
  /// kernels for 16 bits, which are fast and exact.
  fp32,
};

/// Selects how the process computes products of 16-bit operands on CPUs. The program may call it at
/// any time. The default is the value of the environment variable TORCHAMP_CPU_PRODUCTS (`fp32` or
/// `libtorch`), and `fastest` if it is not set.
///
/// The next of these events applies the choice: an enabled guard for a CPU in 16 bits; the creation
/// of MasterWeights or ShardedMasterWeights for a model on a CPU; a step of a FusedMuon on a CPU,
/// which multiplies in bf16 without a guard. For `fastest`, the first such event measures. If
/// products run in fp32, the event also registers kernels for the CPU with LibTorch's dispatcher.
/// From then on, backward passes and code without guards also use these kernels. If another library
/// has replaced an op's CPU kernel, that kernel stays. A process without such an event keeps
/// LibTorch's kernels. Any thread; never synchronises.
void set_cpu_products(CpuProducts products);

/// Returns how CPUs compute products in `dtype` (fp16 or bf16) from the next guard on: `libtorch`
/// or `fp32`. For `fastest`, the first call for a dtype measures for some milliseconds, unless a
/// guard has already measured. Any thread. Errors: another dtype; a bad value of
/// TORCHAMP_CPU_PRODUCTS.
CpuProducts cpu_products(at::ScalarType dtype);

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/core/products/cpu_products.h"  // IWYU pragma: export
