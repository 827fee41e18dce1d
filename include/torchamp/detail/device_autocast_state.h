// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace torchamp::detail {

/// LibTorch's autocast state of the calling thread for one device type, as it was at construction.
class DeviceAutocastState {
 public:
  explicit DeviceAutocastState(at::DeviceType device)
      : device_(device),
        dtype_(at::autocast::get_autocast_dtype(device)),
        enabled_(at::autocast::is_autocast_enabled(device)),
        cache_enabled_(at::autocast::is_autocast_cache_enabled()) {}

  void restore() const {
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
    at::autocast::set_autocast_cache_enabled(cache_enabled_);
  }

  at::ScalarType dtype() const { return dtype_; }

 private:
  at::DeviceType device_;
  at::ScalarType dtype_;
  bool enabled_;
  bool cache_enabled_;
};

}  // namespace torchamp::detail
