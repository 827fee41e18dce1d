// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torchamp/version.h>

TEST(Version, IsOneIntegerToCompareWith) {
  EXPECT_EQ(TORCHAMP_VERSION,
            TORCHAMP_VERSION_MAJOR * 10000 + TORCHAMP_VERSION_MINOR * 100 + TORCHAMP_VERSION_PATCH);
}
