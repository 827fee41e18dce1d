// SPDX-License-Identifier: BSD-3-Clause
#include "benchmark/comparison/processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace {

Way way(const std::string& variant) {
  return {"python", "standard", "bf16", "fused", "eager", variant};
}

TEST(Processes, OneSendsNothing) {
  for (const char* variant : {"parallel", "parallel_16", "sharded", "sharded_16", "zero"}) {
    EXPECT_EQ(least_sent(way(variant), 1000, 1), 0.) << variant;
  }
}

TEST(Processes, AveragesTakeTwiceTheOthersPartOfTheGradients) {
  EXPECT_EQ(least_sent(way("parallel"), 1000, 2), 4000.);
  EXPECT_EQ(least_sent(way("parallel"), 1000, 4), 6000.);
  EXPECT_EQ(least_sent(way("parallel_16"), 1000, 4), 3000.);
}

TEST(Processes, SharesTakeTheOthersPartOfGradientsAndWeights) {
  EXPECT_EQ(least_sent(way("sharded"), 1000, 4), 4500.);
  EXPECT_EQ(least_sent(way("sharded_16"), 1000, 4), 3000.);
  EXPECT_EQ(least_sent(way("zero"), 1000, 4), 6000.);
}

TEST(Processes, WaysAreNamedByWhatSendsAndInWhichDtype) {
  EXPECT_EQ(way("sharded_16").name(), "Python fully_shard, bf16, sent in bf16");
  EXPECT_EQ(way("zero").name(), "Python ZeroRedundancyOptimizer, bf16, sent in fp32");
  Way ours = way("sharded");
  ours.language = "cpp";
  EXPECT_EQ(ours.name(), "torchamp ShardedMasterWeights, bf16, sent in fp32");
  ours.variant = "plain";
  EXPECT_EQ(ours.name(), "torchamp, bf16, fused");
}

}  // namespace
