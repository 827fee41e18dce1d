// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <random>
#include <string>

/// A copy of `bytes` with a few of them changed, dropped, doubled, or cut off.
inline std::string damaged(std::string bytes, std::mt19937& random) {
  for (auto n = 1 + random() % 3; n > 0 && !bytes.empty(); --n) {
    const std::size_t at = random() % bytes.size();
    switch (random() % 5) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
        break;
      case 2:
        bytes.erase(at, 1 + random() % 8);
        break;
      case 3: {
        const std::size_t from = random() % bytes.size();
        bytes.insert(at, bytes.substr(from, 1 + random() % 8));
        break;
      }
      default:
        if (random() % 4 == 0) bytes.resize(at);
    }
  }
  return bytes;
}
