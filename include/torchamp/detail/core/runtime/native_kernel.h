// SPDX-License-Identifier: BSD-3-Clause
// LibTorch's kernels, for calls after torchamp's kernels have replaced them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

#include "torchamp/detail/core/base/devices.h"

#if TORCHAMP_LIBTORCH < 209
/// Returns an op's kernel; before 2.9 LibTorch has no public function for this. An OperatorHandle
/// is a friend of all classes of this template. So this specialisation, which LibTorch itself never
/// uses, may read the private operatorDef_. Remove it together with the support of 2.8.
template <>
class c10::TypedOperatorHandle<struct TorchampKernelLookup> {
 public:
  static const KernelFunction& kernel(const OperatorHandle& op, DispatchKey key) {
    return op.operatorDef_->op.lookup(DispatchKeySet(key));
  }
};
#endif

namespace TORCHAMP_NAMESPACE::detail {

/// An op's kernel, for callBoxed().
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

}  // namespace TORCHAMP_NAMESPACE::detail
