// SPDX-License-Identifier: BSD-3-Clause
// The codes of fp8 as a compiler without GNU's vectors computes them.
#define TORCHAMP_PLAIN_LANES
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support/fp8_reference.h"
#include "torchamp/labs/detail/fp8/formats.h"

namespace {

using namespace torchamp::detail;

/// Numbers of all magnitudes up to `largest`, of both signs, with 0, ties and subnormals.
std::vector<float> numbers_up_to(float largest) {
  std::vector<float> numbers{0.F, -0.F};
  for (std::uint32_t bits = 1; bits < 0x7F800000U; bits += 0x0000FFF1U) {
    const float number = std::bit_cast<float>(bits);
    if (number > largest) break;
    numbers.insert(numbers.end(), {number, -number});
  }
  for (int half_steps = 1; half_steps <= 2 * 448; ++half_steps) {
    const float number = static_cast<float>(half_steps) * 0x1p-10F;
    numbers.insert(numbers.end(), {number, -number});
  }
  while (numbers.size() % 4 != 0) numbers.push_back(0.F);
  return numbers;
}

Floats four_of(const std::vector<float>& numbers, std::size_t at) {
  Floats four = {};
  for (std::size_t k = 0; k < 4; ++k) four[k] = numbers[at + k];
  return four;
}

TEST(PlainLanes, E4m3CodesAreTheNearestOnes) {
  const std::vector<float> numbers = numbers_up_to(448.F);
  for (std::size_t i = 0; i < numbers.size(); i += 4) {
    const Words codes = e4m3_codes(four_of(numbers, i));
    for (std::size_t k = 0; k < 4; ++k) {
      const c10::Float8_e4m3fn expected(numbers[i + k]);
      ASSERT_EQ(codes[k], expected.x) << numbers[i + k];
    }
  }
}

TEST(PlainLanes, E4m3NumbersEqualTheirCodes) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    const float number = e4m3_numbers(all_lanes<Words>(code))[3];
    if (std::isnan(e4m3.value(static_cast<int>(code)))) continue;
    EXPECT_EQ(number, e4m3.value(static_cast<int>(code))) << code;
  }
}

TEST(PlainLanes, E2m1CodesAreTheNearestOnesAndSaturate) {
  constexpr double values[] = {0., 0.5, 1., 1.5, 2., 3., 4., 6.};
  for (int steps = -28; steps <= 28; ++steps) {
    const double number = steps / 4.;
    double nearest = 0.;
    for (int index = 1; index < 8; ++index) {  // of two that are as near, that with the even index
      const double here = std::abs(values[index] - std::abs(number));
      const double before = std::abs(nearest - std::abs(number));
      if (here < before || (here == before && index % 2 == 0)) nearest = values[index];
    }
    const Words codes = e2m1_codes<E2m1Rounding::to_nearest>(
        all_lanes<Floats>(static_cast<float>(number)), all_lanes<Words>(0U));
    EXPECT_EQ(std::abs(e4m3.value(static_cast<int>(codes[0]))), nearest) << number;
  }
}

TEST(PlainLanes, RandomRoundingGoesToEitherNeighbour) {
  const auto code_of = [](float number, std::uint32_t random) {
    const Words codes =
        e2m1_codes<E2m1Rounding::at_random>(all_lanes<Floats>(number), all_lanes<Words>(random));
    return e4m3.value(static_cast<int>(codes[1]));
  };
  EXPECT_EQ(code_of(2.25F, 0U), 2.);
  EXPECT_EQ(code_of(2.25F, 0xBFFFFFU), 2.);
  EXPECT_EQ(code_of(2.25F, 0xC00000U), 3.);
  EXPECT_EQ(code_of(-5.F, 0x7FFFFFU), -4.);
  EXPECT_EQ(code_of(-5.F, 0x800000U), -6.);
}

TEST(PlainLanes, StreamsOfRandomNumbersAreOfAllLanesAndOf24Bits) {
  RandomStreams streams(7);
  const Words first = streams.next(), second = streams.next();
  for (std::size_t k = 0; k < 4; ++k) {
    EXPECT_LT(first[k], 1U << 24);
    EXPECT_NE(first[k], second[k]);
  }
  EXPECT_NE(first[0], first[1]);
}

}  // namespace
