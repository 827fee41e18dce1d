// SPDX-License-Identifier: BSD-3-Clause
#include "support/simulated/memory.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace simulated {

namespace {

// Each device's addresses, reserved once: a look at a pointer says whose it is, also in a signal
// handler, and a stray pointer into freed memory still faults.
constexpr std::size_t arena_bytes = std::size_t{1} << 34;

char* reserve() {
  void* const p =
      mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(p != MAP_FAILED, "simulated device: no address space left");
  return static_cast<char*>(p);
}

struct Arena {
  char* base = reserve();
  std::size_t used = 0;
  std::map<std::size_t, std::vector<char*>> free;  // by size
  std::map<char*, std::unique_ptr<Block>> blocks;
};

struct Memory {
  std::mutex mutex;
  std::array<Arena, device_count> arenas;
};
Memory& memory() {
  static Memory* const m = new Memory;  // outlives every tensor
  return *m;
}

std::array<char*, device_count> bases{};  // for the signal handler, which may not lock

void protect(const Block& block, int how) {
  TORCH_CHECK(mprotect(block.base, block.mapped, how) == 0,
              "simulated device: mprotect: ", std::strerror(errno));
}

void release(void* pointer) {
  Memory& m = memory();
  Block* const block = block_of(pointer);
  check_freed(block->accesses);
  const std::lock_guard lock(m.mutex);
  Arena& arena = m.arenas[static_cast<std::size_t>(block->device)];
  madvise(block->base, block->mapped, MADV_DONTNEED);
  arena.free[block->mapped].push_back(block->base);
  arena.blocks.erase(block->base);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device = c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice();
    if (bytes == 0) return {nullptr, device};
    Block* const block = take(bytes, device.index());
    {
      const Unprotected open({block});
      std::memset(block->base, 0xFF, block->mapped);
    }
    return {block->base, block->base, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const Unprotected open({block_of(to), block_of(from)});
    std::memcpy(to, from, bytes);
  }

 private:
  static Block* take(std::size_t bytes, c10::DeviceIndex device) {
    static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t mapped = (bytes + page - 1) / page * page;
    auto block = std::make_unique<Block>();
    block->mapped = mapped;
    block->device = device;
    block->accesses.home = current_stream(device);
    Memory& m = memory();
    const std::lock_guard lock(m.mutex);
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
    Block* const taken = block.get();
    arena.blocks[taken->base] = std::move(block);
    return taken;
  }
};

void say(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) _exit(139);
}

void on_fault(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (std::size_t d = 0; d < bases.size(); ++d) {
    const auto base = reinterpret_cast<std::uintptr_t>(bases[d]);
    if (address < base || address >= base + arena_bytes) continue;
    say(d == 0 ? "\nsimulated device: the host touched memory of sim:0\n"
               : "\nsimulated device: the host touched memory of sim:1\n");
    std::array<void*, 64> frames{};
    backtrace_symbols_fd(frames.data(), backtrace(frames.data(), 64), STDERR_FILENO);
  }
  std::signal(SIGSEGV, SIG_DFL);  // returning runs into the fault again
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

Unprotected::Unprotected(std::vector<Block*> blocks) : blocks_(std::move(blocks)) {
  const std::lock_guard lock(memory().mutex);
  for (Block* const block : blocks_) {
    if (block->users++ == 0) protect(*block, PROT_READ | PROT_WRITE);
  }
}

Unprotected::~Unprotected() {
  const std::lock_guard lock(memory().mutex);
  for (Block* const block : blocks_) {
    if (--block->users == 0) protect(*block, PROT_NONE);
  }
}

void install_fault_handler() {
  for (std::size_t d = 0; d < bases.size(); ++d) bases[d] = memory().arenas[d].base;
  std::array<void*, 1> frame{};
  backtrace(frame.data(), 1);  // loads what it needs now, not in the handler
  struct sigaction action {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace simulated
