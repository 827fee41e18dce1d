// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/pinned.h"

#include <cstring>
#include <map>
#include <mutex>

#include "simulated_device/pages.h"

namespace simulated {

namespace {

struct Pinned {
  std::shared_ptr<void> memory;
  std::size_t bytes;
};
struct AllPinned {
  std::mutex mutex;
  std::map<const char*, Pinned> blocks;
};
AllPinned& all() {
  static AllPinned* const a = new AllPinned;  // outlives every tensor
  return *a;
}

void release_pinned(void* pointer) {
  const std::lock_guard lock(all().mutex);
  all().blocks.erase(static_cast<const char*>(pointer));
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    const std::size_t whole = (bytes + 63) / 64 * 64;
    const std::shared_ptr<void> memory(aligned_bytes(whole), &free_aligned_bytes);
    std::memset(memory.get(), 0xFF, whole);
    const std::lock_guard lock(all().mutex);
    all().blocks[static_cast<const char*>(memory.get())] = {memory, whole};
    return {memory.get(), memory.get(), &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static PinnedAllocator* const allocator = new PinnedAllocator;
  return allocator;
}

std::shared_ptr<void> pinned_block(const void* pointer) {
  const std::lock_guard lock(all().mutex);
  auto after = all().blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == all().blocks.begin()) return nullptr;
  const auto& [base, pinned] = *std::prev(after);
  return pointer < base + pinned.bytes ? pinned.memory : nullptr;
}

}  // namespace simulated
