// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <limits>

/// How many times as much of this thread's CPU time `run(large)` takes as `run(small)`: about large
/// / small if the cost grows with the size; its square if the cost grows with the size's square.
/// The shortest of three runs each: other programs on the machine do not count.
template <class Run>
double growth(const Run& run, std::size_t small, std::size_t large) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const auto seconds = [&](std::size_t size) {
    double shortest = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3; ++i) {
      const double start = now();
      run(size);
      shortest = std::min(shortest, now() - start);
    }
    return shortest;
  };
  const double at_small = seconds(small);
  return seconds(large) / at_small;
}
