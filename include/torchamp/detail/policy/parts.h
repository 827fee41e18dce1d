// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/policy/parse.h"

namespace torchamp::detail {

/// What a text for several policies says of one.
struct PolicyPart {
  std::string module;     // empty: of all ops
  std::string_view text;  // behind the line "module NAME"
  int64_t first_line;     // its number in the whole
};

/// A text for a policy and for those of modules, cut into parts, of which the first is for all ops.
/// They refer to `text`.
inline std::vector<PolicyPart> parts_of_policies(std::string_view text) {
  const std::string_view common = text_before_modules(text);
  std::vector<PolicyPart> parts{{std::string(), common, 1}};
  int64_t number = 1 + std::count(common.begin(), common.end(), '\n');
  for (std::size_t at = common.size(); at < text.size(); ++number) {
    const std::size_t size = std::min(text.find('\n', at), text.size() - 1) + 1 - at;
    if (auto module = module_of_line(text.substr(at, text.find('\n', at) - at))) {
      parts.push_back({std::move(*module), text.substr(at + size, 0), number + 1});
    } else {
      std::string_view& part = parts.back().text;
      part = {part.data(), part.size() + size};
    }
    at += size;
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
