// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The device types that have autocast, and an index for tables by device.
inline constexpr std::size_t device_count =
    std::tuple_size_v<std::remove_const_t<decltype(at::autocast::_AUTOCAST_SUPPORTED_DEVICES)>>;

/// Index of `device` among the devices that have autocast; an error naming `call` for any other.
inline std::size_t device_index(at::DeviceType device, const char* call) {
  const auto& all = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  const auto found = std::find(all.begin(), all.end(), device);
  TORCH_CHECK(found != all.end(), call, ": LibTorch has no autocast for the device type '", device,
              "'. Pass torch::kCPU, torch::kCUDA or another device type that has it.");
  return static_cast<std::size_t>(found - all.begin());
}

inline at::DispatchKey autocast_key(at::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

}  // namespace torchamp::detail
