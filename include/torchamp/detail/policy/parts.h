// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/policy/parse.h"

namespace torchamp::detail {

/// A text for a policy and for those of modules, cut into parts: the first is for all ops, by an
/// empty name. A module's part holds the first as well; lines keep their numbers.
inline std::vector<std::pair<std::string, std::string>> parts_of_policies(std::string_view text) {
  const std::string_view common = text_before_modules(text);
  text.remove_prefix(common.size());
  std::vector<std::pair<std::string, std::string>> parts{{std::string(), std::string(common)}};
  std::string lines_before;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (auto module = module_of_line(line)) {
      parts.emplace_back(std::move(*module), parts[0].second + lines_before + '\n');
    } else {
      parts.back().second.append(line).append("\n");
    }
    lines_before += '\n';
  }
  return parts;
}

/// Whether there is more than comments.
inline bool says_something(std::string_view text) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (!strip(line.substr(0, line.find('#'))).empty()) return true;
  }
  return false;
}

}  // namespace torchamp::detail
