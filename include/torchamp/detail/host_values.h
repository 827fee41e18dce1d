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

// What the host knows of numbers that live on a device.

/// A 0-dim fp32 tensor, read at most once. As a bool, whether it is not 0.
template <class T>
struct ReadOnce {
  at::Tensor tensor{};
  std::optional<T> on_host{};

  /// What can be told without waiting for a device.
  std::optional<T> without_reading() const {
    if (on_host) return on_host;
    if (tensor.is_cpu()) return static_cast<T>(*tensor.const_data_ptr<float>());
    return std::nullopt;
  }

  /// Reads the device where the host does not know.
  T read() {
    if (!on_host) on_host = static_cast<T>(tensor.item<float>());
    return *on_host;
  }

  /// Makes a later change of the tensor invisible.
  void keep() {
    if (!on_host) tensor = tensor.clone();
  }
};

/// An fp32 tensor on the host that nobody has written, for non-blocking copies from `device`:
/// pinned where the accelerator has pinned memory, since copies to any other are waited for.
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

/// Numbers that only a device knows, copied to host memory without anyone waiting for the copy.
class HostMirror {
 public:
  /// Copies `numbers`, fp32 and always as many, behind what their device is doing. Until the copy
  /// arrives, the mirror shows `meanwhile`, or else what it has shown before; 0 at first.
  void send(const at::Tensor& numbers, std::optional<float> meanwhile = {}) {
    if (!shown_.defined()) shown_ = copy_target(numbers.device(), numbers.sizes()).zero_();
    if (meanwhile) std::fill_n(shown_.mutable_data_ptr<float>(), shown_.numel(), *meanwhile);
    shown_.copy_(numbers, /*non_blocking=*/true);
  }

  bool empty() const { return !shown_.defined(); }

  /// What has arrived of number `i`, from the latest send() or one before.
  float operator[](int64_t i) const {
    return static_cast<const volatile float*>(shown_.const_data_ptr<float>())[i];
  }

 private:
  at::Tensor shown_;
};

}  // namespace torchamp::detail
