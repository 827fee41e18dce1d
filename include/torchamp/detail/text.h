// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace torchamp::detail {

/// How much of a name that nobody knows is looked at and shown.
inline constexpr std::size_t longest_shown = 128;

/// What a user gave, for an error's text: the beginning of it if it is long.
inline std::string shorten(std::string_view text) {
  if (text.size() <= longest_shown) return std::string(text);
  return std::string(text.substr(0, longest_shown)) + "...";
}

}  // namespace torchamp::detail
