// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <ostream>
#include <vector>

#include "torchamp/detail/core/runtime/runtime.h"

using torchamp::detail::autocast_devices;  // the types that have autocast

/// Everything of the calling thread that a guard may touch, read from LibTorch and not from
/// torchamp.
struct ThreadState {
  std::vector<bool> enabled;
  std::vector<at::ScalarType> dtypes;
  bool cache_enabled = at::autocast::is_autocast_cache_enabled();
  int nesting = at::autocast::increment_nesting() - 1;
  const void* slots = c10::ThreadLocalDebugInfo::current().get();

  ThreadState() {
    at::autocast::decrement_nesting();
    for (const at::DeviceType device : autocast_devices) {
      enabled.push_back(at::autocast::is_autocast_enabled(device));
      dtypes.push_back(at::autocast::get_autocast_dtype(device));
    }
  }

  bool operator==(const ThreadState&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const ThreadState& state) {
  for (std::size_t i = 0; i < state.enabled.size(); ++i) {
    out << autocast_devices[i] << (state.enabled[i] ? " on " : " off ") << state.dtypes[i] << ", ";
  }
  return out << "cache " << state.cache_enabled << ", nesting " << state.nesting << ", slots "
             << state.slots;
}
