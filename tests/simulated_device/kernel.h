// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simulated_device/memory.h"

namespace simulated {

/// The state that a CPU kernel runs in on the device's behalf: without autograd, autocast or
/// observers, which have all seen the call already.
class OnDevice {
  at::DisableRecordFunctionGuard unobserved_;
  c10::impl::ExcludeDispatchKeyGuard below_{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                            c10::autocast_dispatch_keyset};
};

/// Device tensors as CPU tensors over the same bytes, for the length of one kernel.
class HostView {
 public:
  /// Of `capture`'s copies of the bytes, unless it is null.
  explicit HostView(Capture* capture = nullptr) : capture_(capture) {}

  at::Tensor of(const at::Tensor& tensor);

  /// What a kernel returned, on the device: an argument itself, a view of an argument, or a copy,
  /// in fresh memory.
  at::Tensor back(const at::Tensor& result, c10::Device device, bool& is_fresh);

  /// Gives arguments that the kernel resized their new shape and contents.
  void resize_arguments();

  std::vector<Block*> blocks() const;

 private:
  void* bytes_of(const c10::Storage& storage) const;

  struct Pair {
    at::Tensor device, host;
  };
  Capture* capture_;
  std::vector<Pair> tensors_;
  std::unordered_map<const void*, std::size_t> place_of_;  // of tensors and of storages, by address
  struct StoragePair {
    c10::Storage device, host;
    c10::DispatchKeySet keys;  // of the tensor, which tell an inference tensor
  };
  std::vector<StoragePair> storages_;
};

/// A tensor on the device that nobody has written.
at::Tensor empty_like_on(c10::Device device, const at::Tensor& like);

/// Runs `op` on the arguments on the stack by its CPU kernel, or by `instead`, as one kernel of the
/// device that the arguments are on. An error if they are not all there. A capture keeps `instead`.
void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                const std::function<void(torch::jit::Stack*)>& instead = nullptr);

/// Whether a tensor lies on the simulated accelerator.
inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

}  // namespace simulated
