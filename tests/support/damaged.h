// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

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

/// Whether each byte of a zip file of LibTorch's is padding, or at the ends of a compressed record,
/// where some bits change nothing.
inline std::vector<bool> padding_of(const std::string& zip) {
  std::vector<bool> padding(zip.size());
  const auto two = [&](std::size_t at) {
    return static_cast<unsigned char>(zip[at]) + 256 * static_cast<unsigned char>(zip[at + 1]);
  };
  for (std::size_t at = 0; (at = zip.find("PK\3\4", at)) != std::string::npos; ++at) {
    const std::size_t extra = at + 30 + two(at + 26);
    if (zip.compare(extra, 2, "FB") != 0) continue;
    std::fill_n(padding.begin() + static_cast<std::ptrdiff_t>(extra + 4), two(extra + 2), true);
    if (two(at + 8) == 0) continue;
    const std::size_t data = extra + two(at + 28), end = zip.find("PK\7\b", data);
    padding[data] = padding[end - 2] = padding[end - 1] = true;
  }
  return padding;
}

/// A copy with a flipped bit, a changed byte, a range of zeros, or cut off; outside of `padding`.
inline std::string damaged_once(const std::string& whole, const std::vector<bool>& padding,
                                std::mt19937& random) {
  for (;;) {
    std::string bytes = whole;
    const std::size_t at = random() % bytes.size();
    const std::size_t end = std::min(bytes.size(), at + 1 + random() % 64);
    switch (random() % 5) {
      case 0:
        bytes.resize(at);
        return bytes;
      case 1:
        std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                  bytes.begin() + static_cast<std::ptrdiff_t>(end), '\0');
        break;
      case 2:
        bytes[at] = static_cast<char>(random());
        break;
      default:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
    }
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != whole[i] && !padding[i]) return bytes;
    }
  }
}
