// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/operator_name.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace torchamp::detail {

/// "aten::add.Tensor". c10::toString() writes the same through a stream, which takes ten times as
/// long.
inline std::string full_name(const c10::OperatorName& op) {
  return op.overload_name.empty() ? op.name : op.name + '.' + op.overload_name;
}

/// A hash for tables in memory. std::hash takes three times as long.
inline std::uint64_t quick_hash(std::string_view name) {
  std::uint64_t hash = name.size();
  const auto mix = [&](std::size_t at, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, name.data() + at, size);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  };
  constexpr std::size_t word_size = sizeof(std::uint64_t);
  for (std::size_t at = 0; at + word_size < name.size(); at += word_size) mix(at, word_size);
  if (name.size() >= word_size) {
    mix(name.size() - word_size, word_size);
  } else {
    mix(0, name.size());
  }
  return hash;
}

/// How much of a name that nobody knows is looked at and shown.
inline constexpr std::size_t longest_shown = 128;

/// What a user gave, for an error's text: the beginning of it if it is long.
inline std::string shorten(std::string_view text) {
  if (text.size() <= longest_shown) return std::string(text);
  return std::string(text.substr(0, longest_shown)) + "...";
}

/// Names for an error's text, separated by commas: the first of them if they are many.
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
