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
  return {
      {.member = "dtype",
       .when = {.dtype = at::kHalf},
       .other = {.dtype = at::kBFloat16},
       .text = "float16",
       .form = "float16",
       .holds = {.region_dtype = at::kHalf},
       .fails = {.region_dtype = at::kBFloat16},
       .refused = {{{.dtype = at::kDouble}, "When::dtype is Double, but no region has that dtype"},
                   {{.dtype = at::kFloat8_e4m3fn}, "When::dtype is Float8_e4m3fn"},
                   {{.dtype = at::kFloat8_e5m2}, "When::dtype is Float8_e5m2"},
                   {{.dtype = at::kInt}, "When::dtype is Int"}}},
      {.member = "dtype",
       .when = {.dtype = at::kBFloat16},
       .other = {.dtype = at::kFloat},
       .text = "bfloat16",
       .form = "bfloat16",
       .holds = {.region_dtype = at::kBFloat16},
       .fails = {.region_dtype = at::kFloat}},
      {.member = "dtype",
       .when = {.dtype = at::kFloat},
       .other = {.dtype = at::kHalf},
       .text = "float32",
       .form = "float32",
       .holds = {.region_dtype = at::kFloat},
       .fails = {.region_dtype = at::kHalf}},
  };
}

}  // namespace torchamp
