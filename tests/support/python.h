// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <stdio.h>

#include <cstddef>
#include <cstdlib>
#include <string>

/// What a Python has printed, and its exit status.
struct Answer {
  int status;
  std::string output;
};

/// Runs Python: $TORCHAMP_TEST_PYTHON, or the Python that CMake found.
inline Answer python(const std::string& arguments) {
  const char* const chosen = std::getenv("TORCHAMP_TEST_PYTHON");
#ifdef TORCHAMP_TEST_PYTHON
  const std::string found = TORCHAMP_TEST_PYTHON;
#else
  const std::string found = "python3";
#endif
#ifdef _WIN32
  const auto open_pipe = &_popen;
  const auto close_pipe = &_pclose;
  const std::string quote = "\"", around = quote;  // its shell takes off the outer pair
#else
  const auto open_pipe = &popen;
  const auto close_pipe = &pclose;
  const std::string quote = "'", around;
#endif
  const std::string command =
      around + quote + (chosen ? chosen : found) + quote + ' ' + arguments + " 2>&1" + around;
  FILE* const pipe = open_pipe(command.c_str(), "r");
  if (!pipe) return {-1, "cannot run " + command};
  std::string output;
  char part[4096];
  while (const std::size_t size = fread(part, 1, sizeof part, pipe)) output.append(part, size);
  return {close_pipe(pipe), output};
}
