// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torchamp/version.h"

namespace torchamp::detail {

/// A 0-dim fp32 tensor, read at most once. As a bool, whether it is not 0.
template <class T>
struct ReadOnce {
  at::Tensor tensor{};
  std::optional<T> on_host{};

  /// The value, if it is available without waiting for a device.
  std::optional<T> without_reading() const {
    if (on_host) return on_host;
    if (tensor.is_cpu()) return static_cast<T>(*tensor.const_data_ptr<float>());
    return std::nullopt;
  }

  /// Synchronises if the host does not have the value.
  T read() {
    if (!on_host) on_host = static_cast<T>(tensor.item<float>());
    return *on_host;
  }

  /// Protects the value from later changes of the tensor.
  void keep() {
    if (!on_host) tensor = tensor.clone();
  }
};

}  // namespace torchamp::detail
