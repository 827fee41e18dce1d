// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "support/simulated/memory.h"

/// Calls `call` with memory of the simulated devices for 0, 1, 2, … allocations, until it has
/// enough; after each failure, with all memory again, `failed`. Returns how often it failed.
template <class Call, class Failed>
int until_memory_suffices(const Call& call, const Failed& failed) {
  constexpr int most = 500;
  for (int allocations = 0; allocations < most; ++allocations) {
    SCOPED_TRACE(allocations);
    try {
      const simulated::AllocationLimit limit(allocations);
      call();
      return allocations;
    } catch (const c10::OutOfMemoryError&) {
    }
    failed();
  }
  ADD_FAILURE() << "no memory is enough";
  return most;
}
