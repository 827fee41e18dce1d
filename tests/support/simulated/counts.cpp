// SPDX-License-Identifier: BSD-3-Clause
#include "support/simulated/counts.h"

#include <mutex>

namespace simulated {

namespace {

struct Shared {
  std::mutex mutex;
  Totals totals;
};
Shared& shared() {
  static Shared* const s = new Shared;  // outlives every thread
  return *s;
}

}  // namespace

Totals totals() {
  const std::lock_guard lock(shared().mutex);
  return shared().totals;
}

void count(int64_t Totals::*what, int64_t by) {
  const std::lock_guard lock(shared().mutex);
  shared().totals.*what += by;
}

}  // namespace simulated
