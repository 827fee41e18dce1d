// SPDX-License-Identifier: BSD-3-Clause
// What the examples use that each operating system has in a form of its own.
#pragma once

#ifdef _WIN32
#include <io.h>
#include <locale.h>
#elif defined(__APPLE__)
#include <unistd.h>
#include <xlocale.h>
#else
#include <locale.h>
#include <unistd.h>
#endif

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <filesystem>

namespace support {

#ifdef _WIN32

inline bool is_terminal(std::FILE* file) {
  return _isatty(_fileno(file)) != 0;
}

/// Whether files can be made in the folder.
inline bool is_writable(const std::filesystem::path& folder) {
  return _waccess(folder.c_str(), 2) == 0;
}

/// std::vsnprintf with a decimal point, whatever locale the program has set.
inline void print_classic(char* text, std::size_t size, const char* pattern,
                          std::va_list arguments) {
  static const _locale_t classic = _create_locale(LC_ALL, "C");
  _vsnprintf_l(text, size, pattern, classic, arguments);
  text[size - 1] = '\0';
}

#else

inline bool is_terminal(std::FILE* file) {
  return isatty(fileno(file)) == 1;
}

/// Whether files can be made in the folder.
inline bool is_writable(const std::filesystem::path& folder) {
  return access(folder.c_str(), W_OK | X_OK) == 0;
}

/// std::vsnprintf with a decimal point, whatever locale the program has set.
inline void print_classic(char* text, std::size_t size, const char* pattern,
                          std::va_list arguments) {
  static const locale_t classic = newlocale(LC_ALL_MASK, "C", nullptr);
  const locale_t before = uselocale(classic);
  std::vsnprintf(text, size, pattern, arguments);
  uselocale(before);
}

#endif

}  // namespace support
