// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The examined and shown part of an unknown name.
inline constexpr std::size_t longest_shown = 128;

/// A user's input in an error message, abbreviated if long.
[[gnu::cold]] inline std::string shorten(std::string_view text) {
  if (text.size() <= longest_shown) return std::string(text);
  return std::string(text.substr(0, longest_shown)) + "...";
}

/// The pieces of a text. (LibTorch's macros make a function for each list of their types.)
[[gnu::cold]] inline std::string joined(std::initializer_list<std::string_view> pieces) {
  std::string text;
  for (const std::string_view piece : pieces) text += piece;
  return text;
}

/// Throws an error of that text.
[[noreturn, gnu::cold]] inline void fail(std::initializer_list<std::string_view> pieces) {
  TORCH_CHECK(false, joined(pieces));
}

/// Warns with that text.
[[gnu::cold]] inline void warn(std::initializer_list<std::string_view> pieces) {
  TORCH_WARN(joined(pieces));
}

}  // namespace torchamp::detail
