// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A 64-bit checksum for files of many gigabytes, faster than reading them; incremental, in chunks
/// of any size. It does not protect from deliberate changes.
class Checksum {
 public:
  void add(const void* data, std::size_t size) {
    const auto* next = static_cast<const unsigned char*>(data);
    bytes_ += size;
    while (size > 0) {
      if (held_ == 0 && size >= sizeof block_) {
        mix(next);
        next += sizeof block_;
        size -= sizeof block_;
        continue;
      }
      const std::size_t taken = size < sizeof block_ - held_ ? size : sizeof block_ - held_;
      std::memcpy(block_ + held_, next, taken);
      held_ += taken;
      next += taken;
      size -= taken;
      if (held_ < sizeof block_) continue;
      mix(block_);
      held_ = 0;
    }
  }

  uint64_t value() const {
    Checksum last = *this;
    std::memset(last.block_ + last.held_, 0, sizeof last.block_ - last.held_);
    last.mix(last.block_);
    uint64_t sum = bytes_;
    for (const uint64_t lane : last.lanes_) sum = stir(sum ^ lane);
    return sum;
  }

 private:
  static constexpr uint64_t odd = 0x9e3779b97f4a7c15U;  // 2^64 over the golden ratio
  /// A bijection in which every bit of the argument affects every bit of the result.
  static constexpr uint64_t stir(uint64_t x) {
    for (int round = 0; round < 3; ++round) {
      x ^= x >> 32;
      x *= odd;
    }
    return x ^ x >> 32;
  }
  /// Each lane is a bijection of its word and its old value: one changed word changes the sum.
  void mix(const unsigned char* block) {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      uint64_t word = 0;
      std::memcpy(&word, block + 8 * lane, 8);
      word = (word ^ lanes_[lane]) * odd;
      lanes_[lane] = (word ^ word >> 32) * odd;
    }
  }

  std::array<uint64_t, 4> lanes_{1, 2, 3, 4};
  unsigned char block_[32] = {};
  std::size_t held_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace TORCHAMP_NAMESPACE::detail
