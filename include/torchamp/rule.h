// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/cast.h"

namespace torchamp {

/// One call of an op, as a rule's predicate sees it. Valid only during the predicate.
class OpCall {
 public:
  OpCall(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
      : schema_(schema), stack_(stack) {}

  const c10::FunctionSchema& schema() const { return schema_; }

  /// The argument called `name` in the op's schema: `call.argument("exponent").toScalar()`.
  /// An unknown name is an error that lists the schema.
  const c10::IValue& argument(std::string_view name) const {
    const auto& arguments = schema_.arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == name) return stack_[stack_.size() - arguments.size() + i];
    }
    TORCH_CHECK(false, "OpCall::argument: '", schema_.name(), "' has no argument '", name,
                "'. Its schema is ", schema_);
  }

 private:
  const c10::FunctionSchema& schema_;
  const torch::jit::Stack& stack_;
};

/// When a rule holds: always, unless a member says otherwise.
struct When {
  /// Only in regions of this dtype.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Only for calls for which this returns true. Called on whichever thread calls the op, possibly
  /// on several at once; must not read a device if the step is to stay asynchronous.
  std::function<bool(const OpCall&)> predicate = nullptr;

  bool always() const { return !dtype && !predicate; }
};

namespace detail {

/// Rules that hold only sometimes, in the order in which they were given; the last that holds wins.
struct ConditionalRule {
  Cast cast;
  When when;
};
using ConditionalRules = std::vector<ConditionalRule>;

/// The rules of one overload: one that always holds, if there is one, and rules on top of it that
/// hold only sometimes.
struct OverloadRules {
  std::optional<Cast> cast;
  ConditionalRules conditional;
};

/// Rules by full overload name: "aten::pow.Tensor_Scalar".
using RuleMap = std::map<std::string, OverloadRules, std::less<>>;

inline std::optional<Cast> rule_that_holds(const ConditionalRules& rules, at::ScalarType dtype,
                                           const OpCall& call) {
  for (std::size_t i = rules.size(); i-- > 0;) {
    const When& when = rules[i].when;
    if (when.dtype && *when.dtype != dtype) continue;
    if (when.predicate && !when.predicate(call)) continue;
    return rules[i].cast;
  }
  return std::nullopt;
}

}  // namespace detail
}  // namespace torchamp
