// SPDX-License-Identifier: BSD-3-Clause
// The two checksums of files: the checksum of the zip format, and the checksum of the seal.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <string>

#include "torchamp/detail/extras/io/archive_file.h"

namespace {

using torchamp::detail::Checksum;
using torchamp::detail::Crc32;

TEST(Crc32, IsThatOfTheZipFormatInPiecesOfAnySize) {
  Crc32 known;
  known.add("123456789", 9);
  EXPECT_EQ(known.value(), 0xcbf43926U);
  std::string bytes(1000, '\0');
  std::mt19937 random(2);
  for (char& byte : bytes) byte = static_cast<char>(random());
  Crc32 whole;
  Checksum sum;
  whole.add(bytes.data(), bytes.size());
  sum.add(bytes.data(), bytes.size());
  for (int round = 0; round < 50; ++round) {
    Crc32 crc;
    Checksum other;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t size = std::min<std::size_t>(random() % 70, bytes.size() - at);
      crc.add(bytes.data() + at, size);
      other.add(bytes.data() + at, size);
      at += size;
    }
    EXPECT_EQ(crc.value(), whole.value());
    EXPECT_EQ(other.value(), sum.value());
  }
}

TEST(Checksum, DiffersForEveryChangedByteAndLength) {
  const auto sum_of = [](const std::string& bytes) {
    Checksum sum;
    sum.add(bytes.data(), bytes.size());
    return sum.value();
  };
  std::set<std::uint64_t> sums;
  for (std::size_t length = 0; length < 100; ++length)
    sums.insert(sum_of(std::string(length, '\0')));
  for (std::size_t at = 0; at < 99; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bytes(99, '\0');
      bytes[at] = static_cast<char>(1 << bit);
      sums.insert(sum_of(bytes));
    }
  }
  EXPECT_EQ(sums.size(), 100U + 99 * 8);
}

}  // namespace
