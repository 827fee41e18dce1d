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

/// A level of the calling thread's autocast nesting, whose end LibTorch's weight cache waits for.
class Nesting {
 public:
  /// Returns the depth inside.
  int enter() { return inside_ = at::autocast::increment_nesting(); }

  /// Closes the level, with those that code in between has left open (by an exception, say), and
  /// returns the depth then. Nothing is left to close where that code has closed too many, or where
  /// a region around this one has ended before it.
  int leave() const {
    (void)at::autocast::increment_nesting();
    int depth = at::autocast::decrement_nesting();
    while (depth >= inside_) depth = at::autocast::decrement_nesting();
    return depth;
  }

 private:
  int inside_ = 0;
};

}  // namespace torchamp::detail
