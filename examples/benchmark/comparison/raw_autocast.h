// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>

/// What a program without torchamp writes: LibTorch's own switches, put back at the end.
class RawAutocast {
 public:
  RawAutocast(at::DeviceType device, at::ScalarType dtype)
      : device_(device),
        enabled_before_(at::autocast::is_autocast_enabled(device)),
        dtype_before_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::increment_nesting();
  }
  ~RawAutocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, enabled_before_);
    at::autocast::set_autocast_dtype(device_, dtype_before_);
  }
  RawAutocast(const RawAutocast&) = delete;
  RawAutocast& operator=(const RawAutocast&) = delete;

 private:
  at::DeviceType device_;
  bool enabled_before_;
  at::ScalarType dtype_before_;
};
