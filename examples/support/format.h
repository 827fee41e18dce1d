// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>

namespace support {

/// std::printf into a string, for g++ 12's library has no std::format. At most 511 characters.
[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
  char text[512];
  std::va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

/// "12.3 MiB"
inline std::string format_bytes(std::int64_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / (1024. * 1024.);
  return mebibytes < 1024. ? format("%.1f MiB", mebibytes) : format("%.2f GiB", mebibytes / 1024.);
}

/// "940 us", "12.3 ms", "1.23 s"
inline std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return format("%.0f us", seconds * 1e6);
  if (seconds < 1.) return format("%.3g ms", seconds * 1e3);
  return format("%.3g s", seconds);
}

}  // namespace support
