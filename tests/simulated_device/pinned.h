// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>

namespace simulated {

/// Host memory that non-blocking copies need. Fresh memory is poison, as a device's is.
c10::Allocator* pinned_allocator();

/// Keeps the pinned memory that `pointer` lies in for as long as it is held, as CUDA does for a
/// copy under way; null if it is not pinned.
std::shared_ptr<void> pinned_block(const void* pointer);

/// Takes pinned memory away while it lives, as from a backend that has none.
class WithoutPinnedMemory {
 public:
  WithoutPinnedMemory() { missing() = true; }
  ~WithoutPinnedMemory() { missing() = false; }
  WithoutPinnedMemory(const WithoutPinnedMemory&) = delete;
  WithoutPinnedMemory& operator=(const WithoutPinnedMemory&) = delete;

  static std::atomic<bool>& missing() {
    static std::atomic<bool> is_missing = false;
    return is_missing;
  }
};

}  // namespace simulated
