// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

/// A line of /proc/self/status in bytes: "VmRSS" is what this process holds in memory, "VmHWM" the
/// most that it ever held. 0 where there is no such file.
inline std::int64_t process_memory(const std::string& line) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kibibytes = 0;
    if (word == line + ":" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}
