// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/jit/frontend/edit_distance.h>

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

/// The number of single-character edits between two names; for long ones, between their beginnings.
[[gnu::cold]] inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  const std::string from(a.substr(0, longest_shown)), to(b.substr(0, longest_shown));
  return torch::jit::ComputeEditDistance(from.c_str(), to.c_str(), /*maxEditDistance=*/0);
}

}  // namespace torchamp::detail
