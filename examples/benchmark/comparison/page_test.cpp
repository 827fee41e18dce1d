// SPDX-License-Identifier: BSD-3-Clause
#include "benchmark/comparison/page.h"

#include <gtest/gtest.h>

#include <string>

namespace {

TEST(Page, BeginsWithTheMachineAndOneChapter) {
  EXPECT_EQ(with_chapter("", "growth", "a machine", "Text.\n\n### A table\n"),
            "# Mixed precision on a machine\n\n## Growth\n\nText.\n\n### A table\n");
}

TEST(Page, KeepsTheOtherChaptersInTheirOrder) {
  std::string page = with_chapter("", "growth", "a machine", "Costs.\n\n### Training\n\nFirst.\n");
  page = with_chapter(page, "training", "a machine", "Steps.\n");
  page = with_chapter(page, "processes", "a machine", "Bytes.\n");
  EXPECT_EQ(page,
            "# Mixed precision on a machine\n\n## Training\n\nSteps.\n\n## Several processes\n\n"
            "Bytes.\n\n## Growth\n\nCosts.\n\n### Training\n\nFirst.\n");
}

TEST(Page, ReplacesTheChapterOfATaskThatRunsAgain) {
  std::string page = with_chapter("", "training", "a machine", "Old.\n\n### BERT\n\nOld, too.\n");
  page = with_chapter(page, "growth", "a machine", "Costs.\n");
  page = with_chapter(page, "training", "a machine", "New.\n\n");
  EXPECT_EQ(page, "# Mixed precision on a machine\n\n## Training\n\nNew.\n\n## Growth\n\nCosts.\n");
}

}  // namespace
