// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// LibTorch's autocast switch and dtype of a thread for one device type.
struct DeviceAutocastState {
  at::DeviceType device;
  at::ScalarType dtype;
  bool enabled;

  /// As it is on the calling thread.
  static DeviceAutocastState of(at::DeviceType device) {
    return {device, at::autocast::get_autocast_dtype(device),
            at::autocast::is_autocast_enabled(device)};
  }

  /// Puts it in force on the calling thread.
  void apply() const {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }

  bool operator==(const DeviceAutocastState&) const = default;
};

}  // namespace torchamp::detail
