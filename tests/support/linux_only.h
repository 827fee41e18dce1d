// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

// Tests that start processes, limit the size of files, stand in for the C library's calls or name
// what only Linux has lie between `#ifdef __linux__` and `#else`. For each such part, a test behind
// `#else` consists of this line, so that other systems report what they leave out.
#define SKIP_WITHOUT_LINUX() \
  GTEST_SKIP() << "what these tests ask of the system is written for Linux"
