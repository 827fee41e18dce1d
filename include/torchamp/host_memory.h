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

/// Whether malloc is glibc's own, not replaced by the program or its environment.
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
// LibTorch allocates CPU tensors by malloc. glibc's malloc gets every block above some size from
// the kernel, and returns it, and the free end of its heap, at once. So the kernel clears the pages
// of gradients, casts and activations anew in every step. Three settings belong together: large
// blocks come from the heap, the heap's end is not returned, and the heap grows by 64 MB. Measured
// on a CPU with avx512_bf16, one thread, 8 feed-forward blocks of 768 in bf16, 512 tokens, fused
// AdamW; page faults and processor time per step (median of 10):
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
// Our own allocator gains nothing for these large tensors, and would not serve oneDNN and the
// standard library. It helps small ones: see Note [Blocks that a thread keeps].

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
