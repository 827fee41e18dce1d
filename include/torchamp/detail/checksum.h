// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "torchamp/version.h"

namespace torchamp::detail {

/// tables[n][b]: the effect of byte b on a CRC after n more bytes.
using Crc32Tables = std::array<std::array<uint32_t, 256>, 8>;

/// Not constexpr, which would cost each including file more than all else here.
inline Crc32Tables crc32_tables() {
  Crc32Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320U : 0U);
    tables[0][byte] = crc;
  }
  for (std::size_t more = 1; more < tables.size(); ++more) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[more - 1][byte];
      tables[more][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

/// The CRC-32 of the zip format, incremental.
class Crc32 {
 public:
  void add(const void* data, std::size_t size) {
    static const Crc32Tables tables = crc32_tables();
    const auto* byte = static_cast<const unsigned char*>(data);
    uint32_t crc = ~crc_;
    for (; size >= 8; size -= 8, byte += 8) {
      crc ^= uint32_t{byte[0]} | uint32_t{byte[1]} << 8 | uint32_t{byte[2]} << 16 |
             uint32_t{byte[3]} << 24;
      crc = tables[7][crc & 0xff] ^ tables[6][crc >> 8 & 0xff] ^ tables[5][crc >> 16 & 0xff] ^
            tables[4][crc >> 24] ^ tables[3][byte[4]] ^ tables[2][byte[5]] ^ tables[1][byte[6]] ^
            tables[0][byte[7]];
    }
    for (; size > 0; --size, ++byte) crc = crc >> 8 ^ tables[0][(crc ^ *byte) & 0xff];
    crc_ = ~crc;
  }
  uint32_t value() const { return crc_; }

 private:
  uint32_t crc_ = 0;
};

/// A 64-bit checksum for files of many gigabytes, as fast as they are read; incremental, in chunks
/// of any size. No defence against an adversary.
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
  /// A bijection in which every bit reaches every other.
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

}  // namespace torchamp::detail
