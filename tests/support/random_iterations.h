// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <random>
#include <vector>

/// Runs of good and bad iterations (true: bad) that take a scale to its floor and back up.
inline std::vector<bool> random_iterations(std::mt19937::result_type seed, std::size_t count) {
  std::mt19937 random(seed);
  std::vector<bool> bad;
  while (bad.size() < count) {
    const bool kind = random() % 2 == 0;
    const std::size_t longest = random() % 8 == 0 ? 40 : 5;
    const std::size_t length = 1 + random() % longest;
    bad.insert(bad.end(), length, kind);
  }
  bad.resize(count);
  return bad;
}
