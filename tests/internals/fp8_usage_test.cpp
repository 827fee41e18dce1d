// SPDX-License-Identifier: BSD-3-Clause
// What a region under an fp8 rule tells at its end, if no product of it was in fp8.
#include <gtest/gtest.h>

#include <string>

#include "support/warnings.h"
#include "torchamp/labs/detail/fp8/run.h"

namespace {

using torchamp::detail::Fp8Usage;

TEST(Fp8, TheWarningOfARegionNamesEachOpOnce) {
  Fp8Usage usage(nullptr);
  for (const char* const op : {"aten::addmm", "aten::mm", "aten::addmm", "aten::mm"}) {
    usage.called_instead(op, "");
  }
  const CollectedWarnings warnings;
  usage.warn_if_unused();
  EXPECT_NE(warnings.text().find("Called instead: addmm, mm."), std::string::npos)
      << warnings.text();
}

TEST(Fp8, TheWarningOfARegionEndsSomewhere) {
  Fp8Usage usage(nullptr);
  for (int i = 0; i < 1000; ++i) usage.called_instead("aten::op" + std::to_string(i), "");
  const CollectedWarnings warnings;
  usage.warn_if_unused();
  EXPECT_NE(warnings.text().find("op0, op1, op2"), std::string::npos);
  EXPECT_LT(warnings.text().size(), 1000U);
}

}  // namespace
