// SPDX-License-Identifier: BSD-3-Clause
// What torchamp/policy.h and the headers below it have in common: Cast, OpCall and When.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What happens to the floating-point tensor arguments of an op in an autocast region.
/// Only tensors of the region's device are cast, and fp64 never is.
enum class Cast : std::uint8_t {
  native,           ///< LibTorch's own autocast kernel for the device decides
  lower_precision,  ///< cast to the region's dtype (fp16 on CUDA, bf16 on CPU, unless told
                    ///< otherwise)
  fp32,             ///< cast to fp32; an op with an optional output dtype is asked for fp32 instead
  promote,          ///< cast to the widest dtype among the arguments
  unchanged,        ///< left as they are, also in the ops that this op calls
  fp8,              ///< products are made of 8-bit numbers: see Policy::fp8
};

namespace detail {

/// What there is to know of a cast rule beside what it does to a call, which CastArguments says.
struct CastRow {
  Cast cast;
  std::string_view name;  // as the enumerator, in a policy's text and in reports
  bool casts;             // so that only ops whose arguments can be cast may follow it
  std::string_view text;  // for the legend of a printed policy
};

using namespace std::string_view_literals;  // lengths that a compiler need not count
/// Every rule. A new one is an enumerator, a row here, a case of CastArguments and a test.
inline constexpr CastRow cast_rows[] = {
    {Cast::lower_precision, "lower_precision"sv, true,
     "arguments are cast to the region's dtype"sv},
    {Cast::fp32, "fp32"sv, true,
     "arguments are cast to fp32, or the result is asked for in fp32"sv},
    {Cast::promote, "promote"sv, true, "arguments are cast to the widest dtype among them"sv},
    {Cast::fp8, "fp8"sv, true, "products of 8-bit numbers, as Policy::fp8 says"sv},
    {Cast::unchanged, "unchanged"sv, false, "arguments are left as they are"sv},
    {Cast::native, "native"sv, false,
     "LibTorch's own kernel for the device decides, which does what is said behind it"sv},
};

/// Null for a value that is no rule.
constexpr const CastRow* row_of(Cast cast) {
  for (const CastRow& row : cast_rows) {
    if (row.cast == cast) return &row;
  }
  return nullptr;
}

/// The rule that is called `name`; null if there is none.
constexpr const CastRow* row_named(std::string_view name) {
  for (const CastRow& row : cast_rows) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

}  // namespace detail

/// "native", "lower_precision", "fp32", "promote", "unchanged" or "fp8".
constexpr std::string_view to_string(Cast cast) {
  const detail::CastRow* const row = detail::row_of(cast);
  return row == nullptr ? "?" : row->name;
}

/// Prints the name.
inline std::ostream& operator<<(std::ostream& out, Cast cast) {
  return out << to_string(cast);
}

/// One call of an op, as a rule's predicate sees it. Valid only during the predicate.
class OpCall {
 public:
  /// `stack` ends with the arguments.
  OpCall(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> stack)
      : schema_(schema), stack_(stack) {}

  /// The op's schema: its name and its arguments' names and types.
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

  /// Whether it holds for every call.
  bool always() const { return !dtype && !predicate; }
  /// Whether it holds for a call in a region of this dtype.
  bool holds(at::ScalarType region_dtype, const OpCall& call) const {
    return (!dtype || *dtype == region_dtype) && (!predicate || predicate(call));
  }
};

namespace detail {

/// Whether a region whose policy has an OpRule follows it in any call, and what it calls instead.
/// Shared by the threads that take over the region's state.
class OpRuleUsage {
 public:
  virtual ~OpRuleUsage() = default;
  virtual bool has_run() const = 0;
  /// A call followed the rule.
  virtual void run() = 0;
  /// A product was called that the rule does not reach, or that could not follow it (`why`).
  virtual void called_instead(std::string op, const std::string& why) = 0;
  /// At the region's end.
  virtual void warn_if_unused() const = 0;
};

/// How an extra carries out a rule of a policy by itself, options included: products in fp8
/// (torchamp/fp8.h). The table points to it and knows no more. Immutable.
class OpRule {
 public:
  virtual ~OpRule() = default;

  /// Runs a call: takes the arguments off the stack and leaves the result. Where it cannot, says
  /// why, and leaves the stack as it was. Autocast is off.
  virtual std::string run(const c10::OperatorHandle& op, at::DeviceType device,
                          torch::jit::Stack& stack) const = 0;

  /// Why an overload cannot follow the rule; empty if it can.
  virtual std::string why_not_op(std::string_view full_name) const = 0;
  /// Why the current device of a type cannot; empty if it can.
  virtual std::string why_not_on(at::DeviceType device) const = 0;
  /// Why regions of a dtype cannot, on a device that can; empty if they can.
  virtual std::string why_not_in(at::DeviceType device, at::ScalarType dtype) const = 0;
  /// Whether it is an error at the guard that a region cannot.
  virtual bool is_strict() const = 0;

  /// As in a policy's text: "fp8(recipe=rowwise strict)". Rules with one text are the same.
  virtual std::string text() const = 0;

  /// For a new region; `outer`: of the region around it, or null.
  virtual std::shared_ptr<OpRuleUsage> make_usage(
      const std::shared_ptr<OpRuleUsage>& outer) const = 0;
};

/// The rule of Cast::fp8 without options, which torchamp/fp8.h registers; null where no source file
/// includes that.
using MakeOpRule = std::shared_ptr<const OpRule> (*)();

inline MakeOpRule& fp8_rule_maker() {
  static MakeOpRule make = nullptr;
  return make;
}

}  // namespace detail

}  // namespace TORCHAMP_NAMESPACE
