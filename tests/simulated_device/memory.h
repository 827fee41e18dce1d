// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "simulated_device/streams.h"

namespace simulated {

inline constexpr c10::DeviceIndex device_count = 2;

class Capture;
struct Block;

/// The memory of one graph: what its capture allocated, which goes to nobody else until it is
/// released, but within the capture from what was freed to what is allocated on the same stream.
struct Pool {
  std::atomic<Capture*> capture = nullptr;  // while it is under way
  std::vector<Block*> idle;
  bool released = false;
};

/// A piece of a device's memory. Fresh memory is poison: every byte 0xFF, a NaN in any float type.
struct Block {
  char* base = nullptr;
  std::size_t mapped = 0;  // whole pages
  c10::DeviceIndex device = 0;
  int users = 0;               // kernels and copies that run on it now
  std::uint64_t serial = 0;    // no other block has it, also not later
  std::shared_ptr<Pool> pool;  // null for memory of no graph
  Accesses accesses;
};

/// Allocates on the current device. Nobody may touch what it gives but through `Unprotected`.
c10::Allocator* device_allocator();

/// The device in whose memory `pointer` lies.
std::optional<c10::DeviceIndex> device_of(const void* pointer);

/// The block that `pointer` lies in, which lives as long as a tensor over it does.
Block* block_of(const void* pointer);

/// The block of this address and number, null if it is gone.
Block* find_block(const char* base, std::uint64_t serial);

/// Gives back what nobody holds of a pool, and from now on what is freed of it.
void release_pool(Pool& pool);

/// What is allocated on a device, pools included.
std::size_t bytes_in_use(c10::DeviceIndex device);

/// While it lives, both devices together have memory for so many allocations more.
class AllocationLimit {
 public:
  explicit AllocationLimit(int64_t more);
  ~AllocationLimit();
  AllocationLimit(const AllocationLimit&) = delete;
  AllocationLimit& operator=(const AllocationLimit&) = delete;
};

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
