// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

inline bool has_wildcard(std::string_view pattern) {
  return pattern.find_first_of("*?") != std::string_view::npos;
}

/// Whether all of the dotted `name` fits `pattern`: '?' stands for one character and '*' for any
/// number of them within one part of the name, "**" for any number with dots. Takes no longer than
/// the product of their lengths.
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
    bool any = false;
    for (std::size_t i = name.size(); i > 0; --i) {
      const bool same = token == '?' ? name[i - 1] != '.' : name[i - 1] == token;
      fits[i] = fits[i - 1] && same;
      any = any || fits[i];
    }
    if (!any) return false;
    fits[0] = false;
    pattern.remove_prefix(1);
  }
  return fits.back();
}

}  // namespace torchamp::detail
