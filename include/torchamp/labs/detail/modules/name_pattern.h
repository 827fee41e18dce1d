// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The characters that stand for others; behind a backslash each stands for itself.
inline constexpr std::string_view wildcards = "*?";

/// Whether a pattern may fit more than one name.
inline bool has_wildcard(std::string_view pattern) {
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (wildcards.find(pattern[i]) != std::string_view::npos) return true;
    if (pattern[i] == '\\') ++i;
  }
  return false;
}

/// The pattern that fits this name alone.
inline std::string pattern_of(std::string_view name) {
  std::string pattern;
  for (const char c : name) {
    if (c == '\\' || wildcards.find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

/// The one name that a pattern without wildcards fits.
inline std::string name_of_pattern(std::string_view pattern) {
  std::string name;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\' && i + 1 < pattern.size()) ++i;
    name += pattern[i];
  }
  return name;
}

/// Whether all of the dotted `name` fits `pattern`: '?' stands for one character and '*' for any
/// number of them in one part of the name, "**" for any number with dots; behind a backslash
/// each character stands for itself. Takes no longer than the product of their lengths.
inline bool matches(std::string_view pattern, std::string_view name) {
  // fits[i]: the pattern's beginning so far fits the first i characters of the name.
  std::vector<bool> fits(name.size() + 1, false);
  fits[0] = true;
  while (!pattern.empty()) {
    const char token = pattern.front();
    if (token == '*') {
      const bool crosses_dots = pattern.starts_with("**");
      for (std::size_t i = 0; i < name.size(); ++i) {
        if (fits[i] && (crosses_dots || name[i] != '.')) fits[i + 1] = true;
      }
      pattern.remove_prefix(crosses_dots ? 2 : 1);
      continue;
    }
    const bool is_escape = token == '\\' && pattern.size() > 1;
    if (is_escape) pattern.remove_prefix(1);
    const char wanted = pattern.front();
    bool any = false;
    for (std::size_t i = name.size(); i > 0; --i) {
      const bool same = token == '?' ? name[i - 1] != '.' : name[i - 1] == wanted;
      fits[i] = fits[i - 1] && same;
      any = any || fits[i];
    }
    if (!any) return false;
    fits[0] = false;
    pattern.remove_prefix(1);
  }
  return fits.back();
}

}  // namespace TORCHAMP_NAMESPACE::detail
