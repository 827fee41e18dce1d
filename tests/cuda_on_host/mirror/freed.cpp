// SPDX-License-Identifier: BSD-3-Clause
// Memory that LibTorch's caching allocator has back holds NaNs, as new memory does.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "cuda_on_host/stand_in.h"
#include "op.h"

namespace mirror {

namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

void fill_freed(const TraceEntry& entry) {
  if (entry.action_ != TraceEntry::FREE_COMPLETED) return;
  const c10::cuda::CUDAGuard guard(entry.device_);
  // A graph's memory is given again in its capture alone, and other memory outside of captures.
  const bool is_of_graph = entry.mempool_ != c10::MempoolId_t{0, 0};
  if (is_of_graph != stand_in_captures(entry.stream_)) return;
  stand_in_fill(reinterpret_cast<void*>(entry.addr_), entry.size_, entry.stream_);
}

}  // namespace

void fill_freed_memory() {
  static const bool attached = [] {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&fill_freed);
    return true;
  }();
  (void)attached;
}

}  // namespace mirror
