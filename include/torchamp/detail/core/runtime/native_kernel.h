// SPDX-License-Identifier: BSD-3-Clause
// Kernels of LibTorch's, to be called where torchamp's have replaced them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

#include "torchamp/detail/core/base/devices.h"

#if TORCHAMP_LIBTORCH < 209
/// Gives an op's kernel, which LibTorch has no public function for before 2.9. An OperatorHandle
/// befriends all classes of this template, so this one, which LibTorch itself never names, may read
/// its private operatorDef_. To go with the support of 2.8.
template <>
class c10::TypedOperatorHandle<struct TorchampKernelLookup> {
 public:
  static const KernelFunction& kernel(const OperatorHandle& op, DispatchKey key) {
    return op.operatorDef_->op.lookup(DispatchKeySet(key));
  }
};
#endif

namespace torchamp::detail {

/// An op's kernel, to be called by callBoxed().
#if TORCHAMP_LIBTORCH >= 209
using NativeKernel = c10::SafeKernelFunction;
inline NativeKernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.getComputedKernelForDispatchKey(key);
}
#else
using NativeKernel = c10::KernelFunction;
inline NativeKernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return c10::TypedOperatorHandle<TorchampKernelLookup>::kernel(op, key);
}
#endif

}  // namespace torchamp::detail
