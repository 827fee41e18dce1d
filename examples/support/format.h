// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdarg>
#include <cstdint>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "system.h"

#ifdef __GNUC__
#define EXAMPLES_PRINTF [[gnu::format(printf, 1, 2)]]
#else
#define EXAMPLES_PRINTF
#endif

namespace support {

/// std::printf into a string, for g++ 12's library has no std::format. At most 511 characters; with
/// a decimal point whatever locale the program has set.
EXAMPLES_PRINTF inline std::string format(const char* pattern, ...) {
  char text[512];
  std::va_list arguments;
  va_start(arguments, pattern);
  print_classic(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

/// What a program wrote as a number, with a decimal point; also "nan" and "inf". Error: it is none.
inline double number_of(const std::string& text) {
  const bool is_negative = text.starts_with('-');
  const std::string_view size = std::string_view(text).substr(is_negative ? 1 : 0);
  if (size == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (size == "inf") {
    const double infinity = std::numeric_limits<double>::infinity();
    return is_negative ? -infinity : infinity;
  }
  double number = 0.;
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  if (!(in >> std::noskipws >> number) || !in.eof()) {
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
