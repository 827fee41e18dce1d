// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "support/simulated/streams.h"

namespace simulated {

inline constexpr c10::DeviceIndex device_count = 2;

/// A piece of a device's memory. Fresh memory is poison: every byte 0xFF, a NaN in any float type.
struct Block {
  char* base = nullptr;
  std::size_t mapped = 0;  // whole pages
  c10::DeviceIndex device = 0;
  int users = 0;  // kernels and copies that run on it now
  Accesses accesses;
};

/// Allocates on the current device. Nobody may touch what it gives but through `Unprotected`.
c10::Allocator* device_allocator();

/// The device in whose memory `pointer` lies.
std::optional<c10::DeviceIndex> device_of(const void* pointer);

/// The block that `pointer` lies in, which lives as long as a tensor over it does.
Block* block_of(const void* pointer);

/// Lets the process touch blocks for as long as it lives, as a kernel or a copy engine does; the
/// host's own code must not run meanwhile. Threads may hold the same block at once.
class Unprotected {
 public:
  explicit Unprotected(std::vector<Block*> blocks);
  ~Unprotected();
  Unprotected(const Unprotected&) = delete;
  Unprotected& operator=(const Unprotected&) = delete;

 private:
  std::vector<Block*> blocks_;
};

/// Turns a fault in a device's memory into a text that names the device, and the end of the
/// program.
void install_fault_handler();

}  // namespace simulated
