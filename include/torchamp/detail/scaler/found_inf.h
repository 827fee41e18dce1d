// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torchamp/version.h"

namespace torchamp::detail {

/// An overflow flag: a 0-dim fp32 tensor, non-zero where an inf or a NaN was found, and what the
/// host knows of it.
struct FoundInf {
  at::Tensor tensor;
  std::optional<bool> on_host;

  /// What can be told without waiting for a device.
  std::optional<bool> without_reading() const {
    if (on_host) return on_host;
    if (tensor.is_cpu()) return *tensor.const_data_ptr<float>() != 0.F;
    return std::nullopt;
  }

  /// Reads the device, once at most.
  bool read() {
    if (!on_host) on_host = tensor.item<float>() != 0.F;
    return *on_host;
  }
};

}  // namespace torchamp::detail
