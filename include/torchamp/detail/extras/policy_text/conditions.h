// SPDX-License-Identifier: BSD-3-Clause
// The conditions of a rule as text: " when float16". Several conditions are joined by "and".
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/rule.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// As Python and a policy's text call it: "float16".
inline std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

/// The texts that read_condition() accepts, for errors.
inline constexpr std::string_view condition_forms = "float16, bfloat16, float32";

/// The texts of the conditions that are data, one for each member of `when` that is set. (The
/// structured binding names every member, so a new member does not compile until it is here.)
inline std::vector<std::string> condition_texts(const When& when) {
  std::vector<std::string> texts;
  const auto& [dtype, predicate] = when;
  if (dtype) texts.push_back(dtype_name(*dtype));
  return texts;
}

/// Reads one of these texts, whose words are separated by single spaces, into `when`. Returns
/// whether the text is a condition.
inline bool read_condition(const std::string& text, When& when) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    if (dtype_name(dtype) != text) continue;
    when.dtype = dtype;
    return true;
  }
  return false;
}

/// All conditions that are data, as text: "", " when float16".
inline std::string conditions_text(const When& when) {
  const std::vector<std::string> texts = condition_texts(when);
  return texts.empty() ? std::string() : " when " + c10::Join(" and ", texts);
}

/// Reads such a text, as the words of a line: the first is the rule's name. Returns what is wrong
/// with the text; empty if nothing is.
inline std::string read_conditions(const std::vector<std::string>& words, When& when) {
  if (words.size() == 1) return {};
  if (words.size() < 3 || words[1] != "when") {
    return "is not a rule, or a rule and 'when CONDITION' or 'when CONDITION and CONDITION'; the "
           "conditions are " +
           std::string(condition_forms);
  }
  for (auto begin = words.begin() + 1; begin != words.end();) {
    const auto end = std::find(++begin, words.end(), "and");
    const std::string text = c10::Join(" ", std::vector<std::string>(begin, end));
    const auto previous = condition_texts(when).size();
    if (!read_condition(text, when)) {
      return "has the condition '" + shorten(text) + "'; the conditions are " +
             std::string(condition_forms);
    }
    if (condition_texts(when).size() == previous) {
      return "has two conditions of one kind: '" + shorten(text) + "' is the second";
    }
    begin = end;
  }
  return {};
}

}  // namespace TORCHAMP_NAMESPACE::detail
