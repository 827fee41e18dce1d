// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string_view>

namespace torchamp::detail {

inline bool has_wildcard(std::string_view pattern) {
  return pattern.find_first_of("*?") != std::string_view::npos;
}

/// Whether all of the dotted `name` fits `pattern`: '?' stands for one character and '*' for any
/// number of them within one part of the name, "**" for any number with dots.
inline bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() == '*') {
    const bool crosses_dots = pattern.starts_with("**");
    const std::string_view rest = pattern.substr(crosses_dots ? 2 : 1);
    for (std::size_t length = 0; length <= name.size(); ++length) {
      if (matches(rest, name.substr(length))) return true;
      if (length < name.size() && name[length] == '.' && !crosses_dots) return false;
    }
    return false;
  }
  if (name.empty()) return false;
  const bool fits = pattern.front() == '?' ? name.front() != '.' : pattern.front() == name.front();
  return fits && matches(pattern.substr(1), name.substr(1));
}

}  // namespace torchamp::detail
