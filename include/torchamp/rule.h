// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. What an edit of a policy does to ops, and when: a rule, and conditions.

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What an op's rule does to its floating-point tensor arguments in an autocast region. Only
/// tensors on the region's device are cast, and fp64 never is.
enum class Cast : std::uint8_t {
  native,           ///< LibTorch's own autocast kernel for the device decides
  lower_precision,  ///< cast to the region's dtype (by default fp16 on CUDA, bf16 on a CPU)
  fp32,             ///< cast to fp32; an op with a `dtype` argument computes in fp32 instead
  promote,          ///< cast to the widest dtype among the arguments
  unchanged,        ///< not cast, neither for this op nor for the ops that it calls
  fp8,              ///< quantised to 8 bits: see torchamp/labs/fp8.h
};

namespace detail {

using namespace std::string_view_literals;  // the compiler need not count lengths

/// The properties of a cast rule; CastArguments has its effect on a call.
struct CastRow {
  Cast cast;
  std::string_view name;       // in texts and reports
  std::string_view effect;     // in a printed policy
  bool casts = false;          // only ops whose arguments can be cast may have it
  bool follows_input = false;  // results have the dtype that the arguments have
};

/// All rules. For what a new one needs, see .github/CONTRIBUTING.md, A kind of rule.
inline constexpr CastRow cast_rows[] = {
    {.cast = Cast::lower_precision,
     .name = "lower_precision"sv,
     .effect = "arguments are cast to the region's dtype"sv,
     .casts = true},
    {.cast = Cast::fp32,
     .name = "fp32"sv,
     .effect = "arguments are cast to fp32; ops with a dtype argument compute in fp32"sv,
     .casts = true},
    {.cast = Cast::promote,
     .name = "promote"sv,
     .effect = "arguments are cast to the widest dtype among them"sv,
     .casts = true,
     .follows_input = true},
    {.cast = Cast::fp8,
     .name = "fp8"sv,
     .effect = "operands are quantised to 8 bits: see torchamp/labs/fp8.h"sv,
     .casts = true},
    {.cast = Cast::unchanged,
     .name = "unchanged"sv,
     .effect = "arguments are not cast"sv,
     .follows_input = true},
    {.cast = Cast::native,
     .name = "native"sv,
     .effect = "LibTorch's own kernel for the device decides; its effect follows the colon"sv},
};

/// Null for a value that is not a rule.
constexpr const CastRow* row_of(Cast cast) {
  for (const CastRow& row : cast_rows) {
    if (row.cast == cast) return &row;
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

/// A call of an op, for a rule's predicate. Valid only during the predicate.
class OpCall {
 public:
  /// `stack` ends with the arguments.
  OpCall(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> stack)
      : schema_(schema), stack_(stack) {}

  /// The op's schema.
  const c10::FunctionSchema& schema() const { return schema_; }

  /// The argument called `name` in the schema: `call.argument("exponent").toScalar()`. An unknown
  /// name is an error that shows the schema.
  const c10::IValue& argument(std::string_view name) const {
    const auto& arguments = schema_.arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == name) return stack_[stack_.size() - arguments.size() + i];
    }
    TORCHAMP_CHECK(false, "OpCall::argument: '", schema_.name(), "' has no argument '", name,
                   "'. Its schema is ", schema_);
  }

 private:
  const c10::FunctionSchema& schema_;
  c10::ArrayRef<c10::IValue> stack_;
};

/// A function of an op's call, for `When::predicate`. Copies share the function and are equal.
class Predicate {
 public:
  /// No function.
  Predicate(std::nullptr_t = nullptr) {}  // NOLINT(google-explicit-constructor)
  /// A function, function object or lambda that takes a `const OpCall&` and returns a bool.
  template <std::predicate<const OpCall&> Function>
  requires(!std::same_as<Function, Predicate>)
      Predicate(Function function)  // NOLINT(google-explicit-constructor)
      : function_(std::make_shared<const std::function<bool(const OpCall&)>>(std::move(function))) {
    if (*function_ == nullptr) function_ = nullptr;
  }

  /// Whether there is a function.
  explicit operator bool() const { return function_ != nullptr; }
  /// Calls the function, which must exist.
  bool operator()(const OpCall& call) const { return (*function_)(call); }
  /// Whether both are copies of one predicate, or both have no function.
  bool operator==(const Predicate& other) const = default;

 private:
  std::shared_ptr<const std::function<bool(const OpCall&)>> function_;
};

/// The conditions of a rule; none by default. If several are set, the rule applies if all hold.
struct When {
  /// Only in regions of this dtype.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Only for calls for which this function returns true. It is called once per call of the op, on
  /// the thread that calls the op (possibly on several threads at once), with autocast off. It may
  /// call ops, including the op itself; profilers and a CastRecorder do not record these. If it
  /// synchronises, so does the step.
  Predicate predicate = nullptr;

  // The structured bindings name every member. So a new member does not compile until each of these
  // functions has it.

  /// Throws if no region fulfils the conditions. `call` begins the error text.
  void check(const std::string& call) const {
    const auto& [only_dtype, only_if] = *this;
    const bool is_possible = !only_dtype || *only_dtype == at::kHalf ||
                             *only_dtype == at::kBFloat16 || *only_dtype == at::kFloat;
    TORCHAMP_CHECK(is_possible, call, ": When::dtype is ", c10::toString(*only_dtype),
                   ", but no region has that dtype. Pass torch::kHalf, torch::kBFloat16 or, for "
                   "CUDA regions, torch::kFloat.");
  }
  /// Whether all conditions are equal.
  bool operator==(const When& other) const = default;
  /// Whether the rule holds for every call.
  bool always() const { return *this == When(); }
  /// Whether the rule can hold for a call in a region of this dtype.
  bool may_hold_in(at::ScalarType region_dtype) const {
    const auto& [only_dtype, only_if] = *this;
    return !only_dtype || *only_dtype == region_dtype;
  }
  /// Whether the rule holds for this call in a region of this dtype.
  bool holds(at::ScalarType region_dtype, const OpCall& call) const {
    const auto& [only_dtype, only_if] = *this;
    return may_hold_in(region_dtype) && (!only_if || only_if(call));
  }
};

}  // namespace TORCHAMP_NAMESPACE
