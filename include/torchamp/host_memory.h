// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief keep_host_memory(): memory of the host that a training step need not ask the kernel for.

#include <cstddef>  // so that __GLIBC__ is there
#ifdef __GLIBC__
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <c10/util/Flags.h>
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <utility>
#endif

#include "torchamp/version.h"

#ifdef __GLIBC__
// LibTorch's flags, which fill memory that it takes from malloc.
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace torchamp::detail {

/// Multiples of 64 bytes, four per power of two. So a block exceeds the request by at most 63 bytes
/// or a quarter, and two sizes differ by more than malloc's overhead.
struct BlockSizes {
  static constexpr std::size_t smallest = 64;
  static constexpr std::size_t largest = std::size_t{1} << 20;
  static constexpr std::size_t count = 4 * std::bit_width(largest / smallest) - 8;
  static constexpr std::size_t none = count;  ///< the class of other blocks
  static constexpr std::size_t added = 40;    ///< at most, by glibc's malloc to an aligned block

  static constexpr std::size_t class_of(std::size_t bytes) {
    if (bytes > largest) return none;
    const std::size_t last = std::max<std::size_t>(bytes, 1) - 1;
    const int shift = std::max(static_cast<int>(std::bit_width(last)) - 3, 6);
    return 4 * static_cast<std::size_t>(shift - 6) + (last >> shift);
  }
  static constexpr std::size_t bytes_of(std::size_t size_class) {
    if (size_class < 4) return smallest * (size_class + 1);
    return smallest * (5 + size_class % 4) << (size_class / 4 - 1);
  }
  /// The class of a block for which malloc has so many bytes.
  static constexpr std::size_t class_within(std::size_t bytes) {
    return bytes < smallest || bytes > largest + added ? none : class_of(bytes + 1) - 1;
  }
};

/// This thread's freed blocks, for its next tensors.
class FreeBlocks {
 public:
  static constexpr std::size_t most_bytes = 32 << 20;

  static FreeBlocks& of_thread() {
    static thread_local constinit FreeBlocks blocks;
    return blocks;
  }

  void* take(std::size_t size_class) {
    Block* const block = first_[size_class];
    if (block != nullptr) {
      first_[size_class] = block->next;
      bytes_ -= bytes_taken(size_class);
    }
    return block;
  }

  /// False if the block has no class, if the thread has enough of them, or if it ends.
  bool keep(void* memory) {
    const std::size_t size_class = BlockSizes::class_within(malloc_usable_size(memory));
    if (size_class == BlockSizes::none || ended_) return false;
    if (reinterpret_cast<std::uintptr_t>(memory) % c10::gAlignment != 0) return false;
    const std::size_t bytes = bytes_taken(size_class);
    if (bytes_ + bytes > most_bytes || !give_back_at_end()) return false;
    first_[size_class] = new (memory) Block{first_[size_class]};
    bytes_ += bytes;
    return true;
  }

  /// Whether there were any.
  bool give_back() {
    for (Block* first : std::exchange(first_, {})) {
      while (first != nullptr) c10::free_cpu(std::exchange(first, first->next));
    }
    return std::exchange(bytes_, 0) > 0;
  }

 private:
  static std::size_t bytes_taken(std::size_t size_class) {
    return BlockSizes::bytes_of(size_class) + BlockSizes::added;
  }

  /// The contents of a free block.
  struct Block {
    Block* next;
  };

  /// Whether the thread's end will return the blocks. After all thread_local variables, even if the
  /// first block comes from one that ends as late.
  bool give_back_at_end() {
    if (will_end_) return true;
    static const std::optional<pthread_key_t> key = [] {
      pthread_key_t made{};
      const auto end = [](void* blocks) { static_cast<FreeBlocks*>(blocks)->end(); };
      return pthread_key_create(&made, end) == 0 ? std::optional(made) : std::nullopt;
    }();
    will_end_ = key && pthread_setspecific(*key, this) == 0;
    return will_end_;
  }

  void end() {
    ended_ = true;  // what the thread frees after this goes back at once
    give_back();
  }

  std::array<Block*, BlockSizes::count> first_{};
  std::size_t bytes_ = 0;
  bool will_end_ = false;
  bool ended_ = false;
};

// Note [Blocks that a thread keeps]
// glibc's malloc reuses freed blocks within some 20 ns, except aligned ones, such as LibTorch's:
// each is cut out of a larger one, and merged with its neighbours when freed. With
// keep_host_memory()'s settings that is 5 % of a step of a feed-forward model 200 wide, 4 % of a
// GPT 128 wide and 3 % of such a BERT; nothing for models whose tensors have millions of elements
// (bf16, fused Adam, one thread of a CPU with avx512_bf16).
//
// A block is malloc's, without a header of ours. LibTorch's oneDNN tensors, and programs that use
// raw_deallocate(), free memory by the current allocator, not the one it came from. So each
// allocator must be able to free the other's blocks.

/// LibTorch's allocator of CPU memory, which reports to its profiler as before, but keeps small
/// blocks. For processes with glibc's malloc.
class HostBlocks final : public c10::Allocator {
 public:
  /// Does nothing if the program has its own allocator, or fills new memory.
  static void install() {
    if (FLAGS_caffe2_cpu_allocator_do_zero_fill || FLAGS_caffe2_cpu_allocator_do_junk_fill) return;
    static auto* const blocks = new HostBlocks;  // never destroyed: tensors may live longer
    if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(blocks);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (bytes > 0) {
      memory = block_of(bytes);
      c10::profiledCPUMemoryReporter().New(memory, bytes);
    }
    return {memory, memory, &free, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void* block_of(std::size_t bytes) {
    const std::size_t size_class = BlockSizes::class_of(bytes);
    if (size_class == BlockSizes::none) return new_block(bytes, bytes);
    void* const kept = FreeBlocks::of_thread().take(size_class);
    return kept != nullptr ? kept : new_block(BlockSizes::bytes_of(size_class), bytes);
  }

  /// With room for more bytes than requested.
  static void* new_block(std::size_t room, std::size_t bytes) {
    try {
      return c10::alloc_cpu(room);
    } catch (c10::Error&) {
      // The thread's blocks may be the missing memory.
      if (!FreeBlocks::of_thread().give_back()) {
        c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
        throw;
      }
    }
    return new_block(room, bytes);
  }

  static void free(void* memory) {
    if (memory == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(memory);
    if (!FreeBlocks::of_thread().keep(memory)) c10::free_cpu(memory);
  }
};

/// Whether malloc is glibc's own, not replaced by the program or its environment.
inline bool malloc_is_glibcs() {
  Dl_info used;
  Dl_info glibc;
  return dladdr(dlsym(RTLD_DEFAULT, "malloc"), &used) != 0 &&
         dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &glibc) != 0 &&
         used.dli_fbase == glibc.dli_fbase;
}

}  // namespace torchamp::detail

#endif  // __GLIBC__

namespace TORCHAMP_NAMESPACE {

// Note [Memory that stays]
// LibTorch allocates CPU tensors by malloc. glibc's malloc gets every block above some size from
// the kernel, and returns it, and the free end of its heap, at once. So the kernel clears the pages
// of gradients, casts and activations anew in every step. Three settings belong together: large
// blocks come from the heap, the heap's end is not returned, and the heap grows by 64 MB. Any alone
// ends glibc's own adapting of the others. Measured on a CPU with avx512_bf16, one thread, 8
// feed-forward blocks of 768 in bf16, 512 tokens, fused AdamW, per step (median of 10): 8000 to
// 12000 page faults and 331 ms of processor time as it is, at most 9 and 301 ms with all three; so
// it is with a caching allocator, which would not serve oneDNN and the standard library. One helps
// small tensors: see Note [Blocks that a thread keeps].

/// Makes the process keep freed host memory for reuse: that of LibTorch's CPU tensors, and all else
/// from malloc. After a few steps, a training step then causes almost no page faults. A thread
/// reuses blocks of up to 1 MB that its tensors free, without calling malloc. Call it once, at the
/// start of main, and not in a plugin that is unloaded; further calls do nothing.
///
/// Returns whether the settings are in force: false, with nothing changed, if malloc is not glibc's
/// (another C library, a sanitizer, jemalloc, tcmalloc).
///
/// The process then never shrinks below its peak, except for blocks above 2 GB (where glibc
/// supports such thresholds) and by malloc_trim(0), which returns free memory except the at most 32
/// MB that each thread keeps until it ends. It cannot be undone: glibc stops adapting its settings
/// once they are set. It overrides values from the environment (MALLOC_TRIM_THRESHOLD_ and the
/// like). An allocator that the program passed, or later passes, to c10::SetCPUAllocator stays. The
/// library never makes this call itself.
///
/// Any thread, while no other thread creates its first tensors; memory may already be in use.
/// Touches no device. Source: mallopt(3), c10::SetCPUAllocator.
inline bool keep_host_memory() {
#ifdef __GLIBC__
  if (!detail::malloc_is_glibcs()) return false;
  constexpr int largest = std::numeric_limits<int>::max();
  constexpr int growth = 64 << 20;
  // Old versions accept no threshold above 32 MB; for them M_MMAP_MAX disables such blocks.
  const bool one_heap = mallopt(M_MMAP_THRESHOLD, largest) == 1 || mallopt(M_MMAP_MAX, 0) == 1;
  const bool no_trim = mallopt(M_TRIM_THRESHOLD, largest) == 1;
  if (!one_heap || !no_trim || mallopt(M_TOP_PAD, growth) != 1) return false;
  detail::HostBlocks::install();
  return true;
#else
  return false;
#endif
}

}  // namespace TORCHAMP_NAMESPACE
