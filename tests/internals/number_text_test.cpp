// SPDX-License-Identifier: BSD-3-Clause
// Long doubles as checkpoints hold them, which not every C++ library can read by itself.
#include <gtest/gtest.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "torchamp/detail/extras/io/checkpoint_values.h"

namespace {

using torchamp::detail::of_hexadecimal;

std::string text_of(long double number) {
  char text[80] = {};
  std::to_chars(text, text + sizeof text - 1, number, std::chars_format::hex);
  return text;
}

TEST(NumberText, EveryLongDoubleIsReadAsItWasWritten) {
  using Limits = std::numeric_limits<long double>;
  std::vector<long double> numbers{
      0.L, 1.L, Limits::max(), Limits::min(), Limits::denorm_min(), Limits::infinity()};
  std::mt19937_64 random(3);
  for (int i = 0; i < 10000; ++i) {
    const auto digits = static_cast<long double>(static_cast<std::int64_t>(random()));
    const auto range = static_cast<std::uint64_t>(Limits::max_exponent - Limits::min_exponent);
    numbers.push_back(
        std::ldexp(digits, static_cast<int>(random() % range) + Limits::min_exponent));
  }
  for (const long double number : numbers) {
    for (const long double signed_number : {number, -number}) {
      const auto read = of_hexadecimal(text_of(signed_number));
      ASSERT_TRUE(read) << text_of(signed_number);
      EXPECT_EQ(*read, signed_number) << text_of(signed_number);
      EXPECT_EQ(std::signbit(*read), std::signbit(signed_number));
    }
  }
  EXPECT_TRUE(std::isnan(of_hexadecimal(text_of(Limits::quiet_NaN())).value()));
}

TEST(NumberText, AnotherTextIsNoNumber) {
  for (const char* const text :
       {"", "-", "p", "p3", ".p0", "1.8", "1p", "1p0x", "1.2.3p0", "gp0", "0x1p0"}) {
    EXPECT_FALSE(of_hexadecimal(text)) << text;
  }
}

}  // namespace
