// SPDX-License-Identifier: BSD-3-Clause
#include "diagnose/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "support/temporary_folder.h"

namespace {

using testing::HasSubstr;
using testing::IsNan;
using testing::ThrowsMessage;

std::vector<LoggedStep> read(const std::string& text) {
  const support::TemporaryFolder folder("log-test");
  std::ofstream(folder.path() / "run.csv") << text;
  return read_log(folder.path() / "run.csv");
}

const std::string head = "step,loss,scale,skipped,norm,time\n";

TEST(ReadLog, TellsWhichStepsWereSkippedAndWhatEachTook) {
  const auto steps =
      read(head + "1,0.5,65536,0,2.5,0.25\n2,inf,65536,1,nan,1\n3,0.25,32768,0,,3\n");
  ASSERT_EQ(steps.size(), 3);
  EXPECT_EQ(steps[0].step, 1.);
  EXPECT_EQ(steps[0].loss, 0.5);
  EXPECT_EQ(steps[0].scale, 65536.);
  EXPECT_EQ(steps[0].norm, 2.5);
  EXPECT_FALSE(steps[0].skipped);
  EXPECT_EQ(steps[0].seconds, 0.25);
  EXPECT_TRUE(steps[1].skipped);
  EXPECT_TRUE(std::isinf(steps[1].loss));
  EXPECT_EQ(steps[1].seconds, 0.75);
  EXPECT_FALSE(steps[2].skipped);
  EXPECT_THAT(steps[2].norm, IsNan());
  EXPECT_EQ(steps[2].seconds, 2.);
}

TEST(ReadLog, TakesTheLastOfStepsThatWereMadeAgain) {
  const auto steps =
      read(head + "1,1,8,0,,5\n2,2,8,1,,6\n3,3,4,0,,7\n2,20,8,1,,0.5\n3,30,4,0,,1\n");
  ASSERT_EQ(steps.size(), 3);
  EXPECT_EQ(steps[1].loss, 20.);
  EXPECT_TRUE(steps[1].skipped) << "the first of the second run";
  EXPECT_EQ(steps[1].seconds, 0.5);
  EXPECT_EQ(steps[2].loss, 30.);
  EXPECT_FALSE(steps[2].skipped);
}

TEST(ReadLog, LeavesOutALineThatIsStillBeingWritten) {
  EXPECT_EQ(read(head + "1,1,8,0,,5\n2,2,").size(), 1);
}

TEST(ReadLog, NamesTheFileAndWhatIsWrongInIt) {
  const auto says = [](const std::string& text, const std::string& what) {
    EXPECT_THAT([&] { read(text); }, ThrowsMessage<support::UsageError>(
                                         testing::AllOf(HasSubstr("run.csv"), HasSubstr(what))));
  };
  says("", "is empty");
  says("a,b\n", "does not begin with 'step,loss,scale,skipped,norm,time'");
  says(head, "has no steps yet");
  says(head + "1,1,8,0,,5\n2,2\n3,1,8,0,,5\n", "has '2,2' for the six numbers of a step");
  says(head + "1,x,8,0,,5\n", "has 'x' for a number");
}

}  // namespace
