// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief keep_host_memory(): memory of the host that a training step need not ask the kernel for.

#include <cstdlib>  // which defines __GLIBC__
#ifdef __GLIBC__
#include <dlfcn.h>
#include <malloc.h>

#include <limits>
#endif

#include "torchamp/detail/host_blocks.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

#ifdef __GLIBC__
namespace detail {

/// Whether malloc is glibc's own, and none that the program or its environment put before it.
inline bool malloc_is_glibcs() {
  Dl_info used;
  Dl_info glibc;
  return dladdr(dlsym(RTLD_DEFAULT, "malloc"), &used) != 0 &&
         dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &glibc) != 0 &&
         used.dli_fbase == glibc.dli_fbase;
}

}  // namespace detail
#endif

// Note [Memory that stays]
// LibTorch takes the memory of a CPU tensor from malloc. glibc's asks the kernel for every block
// above some size, and gives it, and what is free at the end of its heap, back at once. So
// gradients, casts and activations are pages that the kernel clears anew in every step. Three
// settings belong together: no block has pages of its own, the heap's end is not given back, and it
// grows by 64 MB. Measured on a CPU with avx512_bf16, one thread, 8 feed-forward blocks of 768 in
// bf16, 512 tokens, fused AdamW, page faults in a step and processor time of it (median of 10):
//
//     as it is                                 8000 to 12000   331 ms
//     M_MMAP_THRESHOLD alone                       0 to 3000   323 ms
//     M_TRIM_THRESHOLD alone, M_TOP_PAD alone 40000 to 60000   343 to 382 ms: any of the settings
//                                                              ends glibc's own adapting of them
//     the first two                                 0 to 771   354 ms
//     all three                                       0 to 9   301 ms
//     a caching allocator, c10::SetCPUAllocator       0 to 1   301 ms
//     LibTorch's THP_MEM_ALLOC_ENABLE=1         7000 to 9000   314 ms, and 15 % more memory
//     all three, and huge pages                            0   307 ms, and 15 % more memory
//
// An allocator of our own gives these large tensors nothing more, and would leave out what oneDNN
// and the standard library take. Small ones it helps: see Note [Blocks that a thread keeps].

/// Makes the process keep the host memory that it has freed, for its next use: LibTorch's tensors
/// on a CPU, and all else that comes from malloc. After a few steps, a training step then takes no
/// page faults to speak of. Blocks of up to 1 MB that tensors free are the same thread's next ones,
/// without malloc. Call it once, at the start of main, and not in a plugin that is unloaded; more
/// calls do nothing more.
///
/// Returns whether the settings are in force. False, and nothing changed, where malloc is not
/// glibc's: on another C library, under a sanitizer, with jemalloc or tcmalloc loaded.
///
/// The process then never shrinks below its peak, except for blocks above 2 GB (where glibc knows
/// such thresholds) and after malloc_trim(0), which gives back what is free now, but for the at
/// most 32 MB that each thread keeps until it ends. It cannot be undone, since glibc does not adapt
/// its settings any more once they were set. Values that the environment gave
/// (MALLOC_TRIM_THRESHOLD_ and the like) are overridden. An allocator that the program gave to
/// c10::SetCPUAllocator stays, and may be given later. The library never calls it by itself.
///
/// Threads: any, while no other thread makes its first tensors; memory may be in use already.
/// Touches no device.
/// Source: mallopt(3), c10::SetCPUAllocator.
inline bool keep_host_memory() {
#ifdef __GLIBC__
  if (!detail::malloc_is_glibcs()) return false;
  constexpr int largest = std::numeric_limits<int>::max();
  constexpr int growth = 64 << 20;
  // Old versions take no threshold above 32 MB; they are asked for no blocks of that kind at all.
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
