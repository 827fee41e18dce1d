// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/jit/frontend/edit_distance.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The examined and shown part of an unknown name.
inline constexpr std::size_t longest_shown = 128;

/// A user's input in an error message, abbreviated if long.
inline std::string shorten(std::string_view text) {
  if (text.size() <= longest_shown) return std::string(text);
  return std::string(text.substr(0, longest_shown)) + "...";
}

/// The number of single-character edits between two names; for long ones, between their beginnings.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  const std::string from(a.substr(0, longest_shown)), to(b.substr(0, longest_shown));
  return torch::jit::ComputeEditDistance(from.c_str(), to.c_str(), /*maxEditDistance=*/0);
}

/// Names for an error message, separated by commas, abbreviated if many.
template <class Names>
std::string list_of(const Names& names) {
  constexpr std::size_t most = 20;
  std::string list;
  std::size_t count = 0;
  for (const auto& name : names) {
    if (count++ < most) (list += list.empty() ? "" : ", ").append(shorten(name));
  }
  if (count > most) list += ", and " + std::to_string(count - most) + " more";
  return list;
}

}  // namespace torchamp::detail
