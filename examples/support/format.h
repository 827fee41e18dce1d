// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <locale.h>

#include <charconv>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <system_error>

namespace support {

/// std::printf into a string, for g++ 12's library has no std::format. At most 511 characters; with
/// a decimal point whatever locale the program has set.
[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
  static const locale_t classic = newlocale(LC_ALL_MASK, "C", nullptr);
  const locale_t before = uselocale(classic);
  char text[512];
  std::va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  uselocale(before);
  return text;
}

/// What a program wrote as a number, with a decimal point. Error: it is none.
inline double number_of(const std::string& text) {
  double number = 0.;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) {
    throw std::invalid_argument("'" + text + "' is no number");
  }
  return number;
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
