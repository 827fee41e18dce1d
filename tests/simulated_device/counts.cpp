// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/counts.h"

#include <mutex>
#include <optional>
#include <utility>

namespace simulated {

namespace {

struct Shared {
  std::mutex mutex;
  Totals totals;
  std::optional<std::vector<Launch>> log;
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

void count_launch(const Launch& launch) {
  const std::lock_guard lock(shared().mutex);
  shared().totals.kernels += launch.kernels;
  if (shared().log) shared().log->push_back(launch);
}

LaunchLog::LaunchLog() {
  const std::lock_guard lock(shared().mutex);
  shared().log.emplace();
}

LaunchLog::~LaunchLog() {
  const std::lock_guard lock(shared().mutex);
  shared().log.reset();
}

std::vector<Launch> LaunchLog::take() {
  const std::lock_guard lock(shared().mutex);
  return std::exchange(*shared().log, {});
}

void count(int64_t Totals::*what, int64_t by) {
  const std::lock_guard lock(shared().mutex);
  shared().totals.*what += by;
}

}  // namespace simulated
