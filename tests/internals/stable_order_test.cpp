// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/shared/stable_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace {

using testing::ElementsAre;
using torchamp::detail::sort_in_stable_order;
using torchamp::detail::stable_order;

TEST(StableOrder, AscendsByTheKey) {
  EXPECT_THAT(stable_order(std::vector{30, 10, 20}, [](int value) { return value; }),
              ElementsAre(1, 2, 0));
}

TEST(StableOrder, LeavesEqualValuesInTheirOrder) {
  // So many that std::sort moves equal ones.
  std::vector<std::size_t> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i;
  sort_in_stable_order(values, [](std::size_t value) { return value % 3; });
  ASSERT_EQ(values.size(), 1000U);
  for (std::size_t i = 1; i < values.size(); ++i) {
    const std::size_t last = values[i - 1];
    EXPECT_TRUE(values[i] % 3 == last % 3 ? values[i] == last + 3 : values[i] % 3 == last % 3 + 1)
        << values[i] << " after " << last;
  }
}

TEST(StableOrder, SortsTextsWithoutLosingOne) {
  std::vector<std::string> names{"head", "body.0", "head", "body.1"};
  sort_in_stable_order(names, [](const std::string& name) { return name; });
  EXPECT_THAT(names, ElementsAre("body.0", "body.1", "head", "head"));
}

}  // namespace
