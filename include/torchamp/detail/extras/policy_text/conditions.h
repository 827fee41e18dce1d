// SPDX-License-Identifier: BSD-3-Clause
// The conditions of a rule as text: " when float16".
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/rule.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// As Python and a policy's text call it: "float16".
inline std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

/// The conditions that are data, as text: " when float16". (Names every member of When, so a new
/// member does not compile until it is here.)
inline std::string conditions_text(const When& when) {
  const auto& [dtype, predicate] = when;
  return dtype ? " when " + dtype_name(*dtype) : std::string();
}

/// Reads such a text, as the words of a line: the first is the rule's name. Returns what is wrong
/// with it; empty if nothing is.
inline std::string read_conditions(const std::vector<std::string>& words, When& when) {
  if (words.size() == 1) return {};
  if (words.size() != 3 || words[1] != "when") {
    return "is not a rule, or a rule and 'when float16', 'when bfloat16' or 'when float32'";
  }
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    if (dtype_name(dtype) == words[2]) when.dtype = dtype;
  }
  return when.dtype ? ""
                    : "has the condition '" + shorten(words[2]) +
                          "', which is not float16, bfloat16 or float32";
}

}  // namespace TORCHAMP_NAMESPACE::detail
