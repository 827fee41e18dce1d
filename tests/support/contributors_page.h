// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>
#include <torch/version.h>

#include <fstream>
#include <iterator>
#include <string>

/// Expects a counted line of a table in the guide's page for contributors. Its counts are for
/// LibTorch 2.15: for an earlier one, which may launch other kernels, the line is a property of the
/// test.
inline void expect_on_contributors_page(const std::string& line) {
#if TORCH_VERSION_MINOR >= 15
  std::ifstream in("../examples/guide/contributors.md");
  const std::string page((std::istreambuf_iterator<char>(in)), {});
  EXPECT_NE(page.find(line + "\n"), std::string::npos) << "not in examples/guide/contributors.md:\n"
                                                       << line;
#else
  ::testing::Test::RecordProperty("costs", line);
#endif
}
