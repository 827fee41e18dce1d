// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "simulated_device/capture.h"
#include "simulated_device/pages.h"

namespace simulated {

namespace {

// Each device's addresses, reserved once: a look at a pointer says whose it is, also in a signal
// handler, and a stray pointer into freed memory still faults.
constexpr std::size_t arena_bytes = std::size_t{1} << 34;

char* reserve() {
  char* const base = reserve_pages(arena_bytes);
  TORCH_CHECK(base, "simulated device: no address space left");
  return base;
}

struct Arena {
  char* base = reserve();
  std::size_t used = 0;
  std::map<std::size_t, std::vector<char*>> free;  // by size
  std::map<char*, std::unique_ptr<Block>> blocks;
  std::size_t in_use = 0;
};

struct Memory {
  std::mutex mutex;
  std::array<Arena, device_count> arenas;
  std::uint64_t blocks_so_far = 0;
  int64_t allocations_left = -1;  // no limit
};
Memory& memory() {
  static Memory* const m = new Memory;  // outlives every tensor
  return *m;
}

std::array<char*, device_count> bases{};  // for the signal handler, which may not lock

/// With the mutex held.
void give_back(Memory& m, const Block& block) {
  Arena& arena = m.arenas[static_cast<std::size_t>(block.device)];
  discard_pages(block.base, block.mapped);
  arena.in_use -= block.mapped;
  arena.free[block.mapped].push_back(block.base);
  arena.blocks.erase(block.base);
}

void release(void* pointer) {
  Memory& m = memory();
  Block* const block = block_of(pointer);
  const std::shared_ptr<Pool> pool = block->pool;
  if (pool) {
    if (Capture* const capture = pool->capture) capture->add_poison(*block);
  } else {
    check_freed(block->accesses);
    Capture::forget_everywhere(*block);
  }
  const std::lock_guard lock(m.mutex);
  if (pool && !pool->released) return pool->idle.push_back(block);
  give_back(m, *block);
}

#if TORCH_VERSION_MINOR >= 9
using AnyAllocator = c10::DeviceAllocator;
#else
using AnyAllocator = c10::Allocator;
#endif

class DeviceAllocator final : public AnyAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device = c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice();
    if (bytes == 0) return {nullptr, device};
    Capture* const capture = capture_of(current_stream(device.index()));
    Block* const block = take(bytes, device.index(), capture ? capture->pool() : nullptr);
    {
      const Unprotected open({block});
      std::memset(block->base, 0xFF, block->mapped);
    }
    if (capture) capture->add_poison(*block);
    return {block->base, block->base, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const Unprotected open({block_of(to), block_of(from)});
    std::memcpy(to, from, bytes);
  }

#if TORCH_VERSION_MINOR >= 9
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}  // there is none
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get()) block_of(data.get())->accesses.recorded.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return {};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
#endif

 private:
  static Block* take(std::size_t bytes, c10::DeviceIndex device,
                     const std::shared_ptr<Pool>& pool) {
    static const std::size_t page = page_size();
    const std::size_t mapped = (bytes + page - 1) / page * page;
    const int64_t home = current_stream(device);
    auto block = std::make_unique<Block>();
    block->mapped = mapped;
    block->device = device;
    block->accesses.home = home;
    block->pool = pool;
    Memory& m = memory();
    const std::lock_guard lock(m.mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, m.allocations_left != 0,
                     "simulated device: out of memory, by an AllocationLimit");
    if (m.allocations_left > 0) --m.allocations_left;
    if (pool) {
      const auto idle = std::find_if(pool->idle.begin(), pool->idle.end(), [&](const Block* b) {
        return b->device == device && b->mapped == mapped && b->accesses.home == home;
      });
      if (idle != pool->idle.end()) {
        Block* const again = *idle;
        pool->idle.erase(idle);
        return again;
      }
    }
    Arena& arena = m.arenas[static_cast<std::size_t>(device)];
    if (std::vector<char*>& free = arena.free[mapped]; !free.empty()) {
      block->base = free.back();
      free.pop_back();
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, arena.used + mapped <= arena_bytes,
                       "simulated device: out of memory, asked for ", bytes, " bytes");
      block->base = arena.base + arena.used;
      arena.used += mapped;
    }
    block->serial = ++m.blocks_so_far;
    arena.in_use += mapped;
    Block* const taken = block.get();
    arena.blocks[taken->base] = std::move(block);
    return taken;
  }
};

const char* whose(std::uintptr_t address) {
  for (std::size_t d = 0; d < bases.size(); ++d) {
    const auto base = reinterpret_cast<std::uintptr_t>(bases[d]);
    if (address < base || address >= base + arena_bytes) continue;
    return d == 0 ? "\nsimulated device: the host touched memory of sim:0\n"
                  : "\nsimulated device: the host touched memory of sim:1\n";
  }
  return nullptr;
}

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator* const allocator = new DeviceAllocator;
  return allocator;
}

std::optional<c10::DeviceIndex> device_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  for (std::size_t d = 0; d < bases.size(); ++d) {
    const auto base = reinterpret_cast<std::uintptr_t>(bases[d]);
    if (address >= base && address < base + arena_bytes) return static_cast<c10::DeviceIndex>(d);
  }
  return std::nullopt;
}

Block* block_of(const void* pointer) {
  const auto device = device_of(pointer);
  TORCH_CHECK(device, "simulated device: ", pointer, " is not a device's memory");
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  auto& blocks = m.arenas[static_cast<std::size_t>(*device)].blocks;
  auto after = blocks.upper_bound(const_cast<char*>(static_cast<const char*>(pointer)));
  TORCH_CHECK(after != blocks.begin(), "simulated device: ", pointer, " is free memory");
  Block* const block = std::prev(after)->second.get();
  TORCH_CHECK(pointer < block->base + block->mapped, "simulated device: ", pointer,
              " is free memory");
  return block;
}

Block* find_block(const char* base, std::uint64_t serial) {
  const auto device = device_of(base);
  if (!device) return nullptr;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto& blocks = m.arenas[static_cast<std::size_t>(*device)].blocks;
  const auto found = blocks.find(const_cast<char*>(base));
  return found != blocks.end() && found->second->serial == serial ? found->second.get() : nullptr;
}

void release_pool(Pool& pool) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  for (Block* const block : std::exchange(pool.idle, {})) give_back(m, *block);
  pool.released = true;
}

std::size_t bytes_in_use(c10::DeviceIndex device) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  return m.arenas[static_cast<std::size_t>(device)].in_use;
}

AllocationLimit::AllocationLimit(int64_t more) {
  const std::lock_guard lock(memory().mutex);
  memory().allocations_left = more;
}

AllocationLimit::~AllocationLimit() {
  const std::lock_guard lock(memory().mutex);
  memory().allocations_left = -1;
}

Unprotected::Unprotected(std::vector<Block*> blocks) : blocks_(std::move(blocks)) {
  const std::lock_guard lock(memory().mutex);
  for (Block* const block : blocks_) {
    if (block->users++ > 0) continue;
    TORCH_CHECK(open_pages(block->base, block->mapped), "simulated device: cannot open its memory");
  }
}

Unprotected::~Unprotected() {
  const std::lock_guard lock(memory().mutex);
  for (Block* const block : blocks_) {
    if (--block->users > 0) continue;
    TORCH_CHECK(close_pages(block->base, block->mapped),
                "simulated device: cannot close its memory");
  }
}

void install_fault_handler() {
  for (std::size_t d = 0; d < bases.size(); ++d) bases[d] = memory().arenas[d].base;
  explain_page_faults(&whose);
}

}  // namespace simulated
