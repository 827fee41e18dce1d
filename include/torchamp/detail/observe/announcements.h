// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/weights/cast.h"

namespace torchamp::detail {

// What overlays tell those who record, by the names of empty scopes: see
// Note [A choice is told once].

/// The rule in a scope's name; nothing if it is no such scope.
inline std::optional<Cast> announced_choice(std::string_view scope) {
  if (!scope.starts_with(choice_scope)) return std::nullopt;
  const CastRow* const row = row_named(scope.substr(choice_scope.size()));
  return row == nullptr ? std::nullopt : std::optional(row->cast);
}

/// What WeightCastNote::tell() has put into a scope's name; nothing if it is no such scope.
inline std::optional<WeightCastNote> announced_weight_cast(std::string_view scope) {
  if (!scope.starts_with(weight_cast_scope)) return std::nullopt;
  scope.remove_prefix(weight_cast_scope.size());
  WeightCastNote note{.hit = scope == "kept"};
  int from = 0;
  int to = 0;
  long long numel = 0;
  const std::string text(scope);
  note.in_place = std::sscanf(text.c_str(), "made %d %d %lld", &from, &to, &numel) == 3;
  note.from = static_cast<at::ScalarType>(from);
  note.to = static_cast<at::ScalarType>(to);
  note.numel = numel;
  return note;
}

}  // namespace torchamp::detail
