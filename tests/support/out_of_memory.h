// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string_view>

#include "simulated_device/memory.h"

/// Calls `call` with memory for 0, 1, 2, … allocations, of the simulated devices or of what `Limit`
/// limits, until it has enough; after each failure, with all memory again, `failed`. Returns how
/// often it failed.
template <class Limit = simulated::AllocationLimit, class Call, class Failed>
int until_memory_suffices(const Call& call, const Failed& failed) {
  constexpr int most = 500;
  for (int allocations = 0; allocations < most; ++allocations) {
    SCOPED_TRACE(allocations);
    try {
      const Limit limit(allocations);
      call();
      return allocations;
    } catch (const c10::Error& error) {  // which a collective call words anew
      if (std::string_view(error.what()).find("out of memory") == std::string_view::npos) throw;
    }
    failed();
  }
  ADD_FAILURE() << "no memory is enough";
  return most;
}
