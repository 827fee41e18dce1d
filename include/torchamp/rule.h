// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string_view>

namespace torchamp {

/// One call of an op, as a rule's predicate sees it. Valid only during the predicate.
class OpCall {
 public:
  /// `stack` ends with the arguments.
  OpCall(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> stack)
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
  c10::ArrayRef<c10::IValue> stack_;
};

/// When a rule holds: always, unless a member says otherwise.
struct When {
  /// Only in regions of this dtype.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Only for calls for which this returns true. Called once for each call of the op, on whichever
  /// thread calls it, possibly on several at once, with autocast off: it may call ops, its own
  /// among them, which profilers and a CastRecorder do not see. Must not read a device if the step
  /// is to stay asynchronous.
  std::function<bool(const OpCall&)> predicate = nullptr;

  bool always() const { return !dtype && !predicate; }
  /// Whether it holds for a call in a region of this dtype.
  bool holds(at::ScalarType region_dtype, const OpCall& call) const {
    return (!dtype || *dtype == region_dtype) && (!predicate || predicate(call));
  }
};

}  // namespace torchamp
