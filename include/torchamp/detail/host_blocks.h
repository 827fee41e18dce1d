// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <new>
#include <utility>

#include "torchamp/version.h"

namespace torchamp::detail {

/// What lies in front of a CPU tensor's memory, as long as LibTorch aligns that.
struct alignas(64) HostBlock {
  std::size_t size_class;
  HostBlock* next;  ///< of those that are free

  void* memory() { return this + 1; }
  static HostBlock* of(void* memory) { return static_cast<HostBlock*>(memory) - 1; }
};

/// Four sizes for each power of two, so that a block is at most a quarter larger than asked for.
struct BlockSizes {
  static constexpr std::size_t smallest = 64;
  static constexpr std::size_t largest = std::size_t{1} << 20;
  static constexpr std::size_t count = 4 * std::bit_width(largest / smallest) - 3;
  static constexpr std::size_t none = count;  ///< the class of larger blocks

  static constexpr std::size_t class_of(std::size_t bytes) {
    if (bytes > largest) return none;
    const std::size_t last = std::max(bytes, smallest) - 1;
    const auto shift = std::bit_width(last) - 3;  // leaves the first bit and the two behind it
    return 4 * (static_cast<std::size_t>(shift) - 3) + (last >> shift) - 7;
  }
  static constexpr std::size_t bytes_of(std::size_t size_class) {
    const std::size_t quarters = size_class + 3;
    return (smallest / 8) * (5 + quarters % 4) << (quarters / 4);
  }
};

/// The blocks that this thread has freed, and will take for its next tensors.
class FreeBlocks {
 public:
  static constexpr std::size_t most_bytes = 32 << 20;

  static FreeBlocks& of_thread() {
    static thread_local constinit FreeBlocks blocks;
    return blocks;
  }

  HostBlock* take(std::size_t size_class) {
    HostBlock* const block = first_[size_class];
    if (block != nullptr) {
      first_[size_class] = block->next;
      bytes_ -= BlockSizes::bytes_of(size_class);
    }
    return block;
  }

  /// False where the thread has enough of them, or ends.
  bool keep(HostBlock* block) {
    const std::size_t bytes = BlockSizes::bytes_of(block->size_class);
    if (ended_ || bytes_ + bytes > most_bytes) return false;
    static thread_local const End end;  // not before the thread has a block to give back
    block->next = std::exchange(first_[block->size_class], block);
    bytes_ += bytes;
    return true;
  }

 private:
  struct End {
    ~End() { of_thread().end(); }
  };

  void end() {
    ended_ = true;  // what the thread frees after this goes back at once
    for (HostBlock* first : first_) {
      while (first != nullptr) c10::free_cpu(std::exchange(first, first->next));
    }
    first_ = {};
  }

  std::array<HostBlock*, BlockSizes::count> first_{};
  std::size_t bytes_ = 0;
  bool ended_ = false;
};

// Note [Blocks that a thread keeps]
// glibc's malloc hands freed blocks out again within some 20 ns, but not those that have to be
// aligned, as LibTorch's are: each of these is cut out of a larger one, and joined to its
// neighbours when it is freed. With keep_host_memory()'s settings that is 5 % of a step of a
// feed-forward model 200 wide, 4 % of a GPT 128 wide and 3 % of such a BERT; nothing of models
// whose tensors have millions of elements (bf16, fused Adam, one thread of a CPU with avx512_bf16).

/// LibTorch's allocator of CPU memory, which reports to its profiler as before, but keeps small
/// blocks.
class HostBlocks final : public c10::Allocator {
 public:
  /// Nothing changes where the program has an allocator of its own.
  static void install() {
    static auto* const blocks = new HostBlocks;  // never destroyed: tensors may live longer
    if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(blocks);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (bytes > 0) {
      memory = block_of(bytes)->memory();
      c10::profiledCPUMemoryReporter().New(memory, bytes);
    }
    return {memory, memory, &free, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static HostBlock* block_of(std::size_t bytes) {
    const std::size_t size_class = BlockSizes::class_of(bytes);
    std::size_t room = bytes;
    if (size_class != BlockSizes::none) {
      if (HostBlock* const kept = FreeBlocks::of_thread().take(size_class)) return kept;
      room = BlockSizes::bytes_of(size_class);
    }
    try {
      // The sum of a size that is out of range could wrap around.
      void* const memory = c10::alloc_cpu(std::max(room, sizeof(HostBlock) + room));
      return new (memory) HostBlock{size_class, nullptr};
    } catch (c10::Error&) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      throw;
    }
  }

  static void free(void* memory) {
    if (memory == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(memory);
    HostBlock* const block = HostBlock::of(memory);
    if (block->size_class != BlockSizes::none && FreeBlocks::of_thread().keep(block)) return;
    c10::free_cpu(block);
  }
};

}  // namespace torchamp::detail
