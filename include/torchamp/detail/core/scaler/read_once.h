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

  /// What can be told without waiting for a device.
  std::optional<T> without_reading() const {
    if (on_host) return on_host;
    if (tensor.is_cpu()) return static_cast<T>(*tensor.const_data_ptr<float>());
    return std::nullopt;
  }

  /// Synchronises where the host does not know.
  T read() {
    if (!on_host) on_host = static_cast<T>(tensor.item<float>());
    return *on_host;
  }

  /// Makes a later change of the tensor invisible.
  void keep() {
    if (!on_host) tensor = tensor.clone();
  }
};

}  // namespace torchamp::detail
