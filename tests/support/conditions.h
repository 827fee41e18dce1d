// SPDX-License-Identifier: BSD-3-Clause
// The conditions of a rule, for the tests of rules and of their text.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "torchamp/rule.h"

namespace torchamp {

/// A call of mm, in a region of this dtype.
struct ConditionCall {
  at::ScalarType region_dtype = at::kBFloat16;
  at::Tensor self = at::ones({2, 2});
  at::Tensor mat2 = at::ones({2, 2});
};

/// A value of a member of When. (A predicate has no row, because it has no text.)
struct Condition {
  std::string member;
  When when;
  When other;        ///< another value of the member
  std::string text;  ///< of `when`, in a policy's text
  std::string form;  ///< in errors that list the conditions
  ConditionCall holds, fails;
  std::vector<std::pair<When, std::string>> refused{};  ///< values that are errors, and their texts
};

/// Which members are set, except the predicate. (The structured binding names every member, so a
/// new member does not compile until it is here.)
inline std::vector<bool> set_members(const When& when) {
  const auto& [dtype, predicate] = when;
  return {dtype.has_value()};
}

/// All conditions that are data, in the order of the members; at least one row for each member.
inline std::vector<Condition> conditions() {
  const auto of_dtype = [](const std::string& text, at::ScalarType dtype, at::ScalarType other) {
    return Condition{.member = "dtype",
                     .when = {.dtype = dtype},
                     .other = {.dtype = other},
                     .text = text,
                     .form = text,
                     .holds = {.region_dtype = dtype},
                     .fails = {.region_dtype = other}};
  };
  Condition half = of_dtype("float16", at::kHalf, at::kBFloat16);
  half.refused = {{{.dtype = at::kDouble}, "When::dtype is Double, but no region has that dtype"},
                  {{.dtype = at::kFloat8_e4m3fn}, "When::dtype is Float8_e4m3fn"},
                  {{.dtype = at::kFloat8_e5m2}, "When::dtype is Float8_e5m2"},
                  {{.dtype = at::kInt}, "When::dtype is Int"}};
  return {half, of_dtype("bfloat16", at::kBFloat16, at::kFloat),
          of_dtype("float32", at::kFloat, at::kHalf)};
}

}  // namespace torchamp
