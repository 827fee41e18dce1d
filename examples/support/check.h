// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

namespace support {

/// Prints what is claimed, and ends the program with exit code 1 if it does not hold.
inline void check(bool holds, const std::string& claim) {
  std::cout << (holds ? "  as expected: " : "  WRONG: ") << claim << std::endl;
  if (!holds) std::exit(1);
}

}  // namespace support
