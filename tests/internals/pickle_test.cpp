// SPDX-License-Identifier: BSD-3-Clause
// Numbers in the pickles that Python writes.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "torchamp/detail/extras/io/pickle.h"

namespace {

using torchamp::detail::PickleReader;

TEST(GradScalerFile, ReadsNegativeAndLongIntegers) {
  const auto integer = [](const std::string& op) {
    const std::string pickle = "\x80\x02" + op + ".";
    const PickleReader reader(pickle);
    EXPECT_EQ(reader.root().kind, PickleReader::Kind::integer);
    return reader.root().integer;
  };
  using namespace std::string_literals;
  EXPECT_EQ(integer("J\xff\xff\xff\xff"s), -1);
  EXPECT_EQ(integer("J\x01\0\0\0"s), 1);
  EXPECT_EQ(integer("\x8a\x00"s), 0);
  EXPECT_EQ(integer("\x8a\x01\xff"s), -1);
  EXPECT_EQ(integer("\x8a\x02\xff\0"s), 255);
  EXPECT_EQ(integer("\x8a\x08\0\0\0\0\0\0\0\x80"s), std::numeric_limits<int64_t>::min());
}

// As in Python, where {"a": 1, "a": 2} is {"a": 2}.
TEST(GradScalerFile, TakesTheLastOfEqualKeys) {
  using namespace std::string_literals;
  const std::string pickle = "\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u."s;
  const PickleReader reader(pickle);
  ASSERT_NE(reader.find(reader.root(), "a"), nullptr);
  EXPECT_EQ(reader.find(reader.root(), "a")->integer, 2);
}

}  // namespace
