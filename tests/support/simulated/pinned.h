// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace simulated {

/// Host memory that non-blocking copies need. Fresh memory is poison, as a device's is.
c10::Allocator* pinned_allocator();

/// Keeps the pinned memory that `pointer` lies in for as long as it is held, as CUDA does for a
/// copy under way; null if it is not pinned.
std::shared_ptr<void> pinned_block(const void* pointer);

}  // namespace simulated
