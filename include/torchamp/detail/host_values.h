// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "torchamp/detail/libtorch.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// The host's knowledge of numbers on a device.

/// A 0-dim fp32 tensor, read at most once. As a bool, whether it is not 0.
template <class T>
struct ReadOnce {
  at::Tensor tensor{};
  std::optional<T> on_host{};

  /// The value, if known without waiting for a device.
  std::optional<T> without_reading() const {
    if (on_host) return on_host;
    if (tensor.is_cpu()) return static_cast<T>(*tensor.const_data_ptr<float>());
    return std::nullopt;
  }

  /// Reads the device if the host does not know.
  T read() {
    if (!on_host) on_host = static_cast<T>(tensor.item<float>());
    return *on_host;
  }

  /// Makes a later change of the tensor invisible.
  void keep() {
    if (!on_host) tensor = tensor.clone();
  }
};

/// An unwritten fp32 tensor on the host, for non-blocking copies from `device`: pinned if the
/// accelerator has pinned memory, since other copies are waited for.
inline at::Tensor copy_target(at::Device device, at::IntArrayRef sizes) {
  const c10::InferenceMode no_inference(false);
  const auto options = at::TensorOptions(at::kCPU).dtype(at::kFloat);
  if (accelerator() != device.type()) return at::empty(sizes, options);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const c10::NotImplementedError&) {  // of a device outside LibTorch, without it
    return at::empty(sizes, options);
  }
}

/// Numbers of a device, copied to host memory without waiting.
class HostMirror {
 public:
  /// Copies `numbers` (fp32, always the same count) behind the device's present work. Until the
  /// copy arrives, the mirror shows `meanwhile`, or else its last values; 0 at first.
  void send(const at::Tensor& numbers, std::optional<float> meanwhile = {}) {
    if (!shown_.defined()) shown_ = copy_target(numbers.device(), numbers.sizes()).zero_();
    if (meanwhile) std::fill_n(shown_.mutable_data_ptr<float>(), shown_.numel(), *meanwhile);
    shown_.copy_(numbers, /*non_blocking=*/true);
  }

  bool empty() const { return !shown_.defined(); }

  /// The latest value of number `i` to have arrived.
  float operator[](int64_t i) const {
    return static_cast<const volatile float*>(shown_.const_data_ptr<float>())[i];
  }

 private:
  at::Tensor shown_;
};

}  // namespace torchamp::detail
