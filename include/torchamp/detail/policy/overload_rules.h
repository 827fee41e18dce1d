// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "torchamp/detail/policy/rule.h"

namespace torchamp::detail {

/// The rules of one overload: one that always holds, if there is one, and on top of it those of
/// edits that hold only sometimes (their indices, in the order in which they were given).
struct OverloadRules {
  std::optional<Cast> cast;
  std::vector<std::size_t> conditional;
};

/// Rules by full overload name: "aten::pow.Tensor_Scalar".
using RuleMap = std::map<std::string, OverloadRules, std::less<>>;

}  // namespace torchamp::detail
