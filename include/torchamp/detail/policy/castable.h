// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace torchamp::detail {

using namespace std::string_view_literals;

/// Whether `type` is `Tensor`, `Tensor?`, `Tensor[]`, `Tensor[]?` or `Tensor?[]`.
inline bool holds_tensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return true;
    case c10::TypeKind::OptionalType:
      return holds_tensors(*type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType: {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      return element.kind() != c10::TypeKind::ListType && holds_tensors(element);
    }
    default:
      return false;
  }
}

/// Whether `argument` is `ScalarType dtype`, or, if `optional`, `ScalarType? dtype`.
inline bool is_dtype(const c10::Argument& argument, bool optional) {
  if (argument.name() != "dtype"sv) return false;
  const c10::Type* type = argument.real_type().get();
  const bool is_optional = type->kind() == c10::TypeKind::OptionalType;
  if (is_optional) type = type->castRaw<c10::OptionalType>()->getElementType().get();
  return is_optional == optional && type->kind() == c10::TypeKind::ScalarTypeType;
}

/// Whether the op takes named dimensions, which newer LibTorchs do not have. It can be covered, as
/// LibTorch boxes names as strings, but the table does not cast it.
inline bool takes_named_dimensions(const c10::FunctionSchema& schema) {
  const std::string_view overload = schema.overload_name();
  return overload.find("name"sv) != overload.npos &&
         (overload.find("imname"sv) != overload.npos || overload.find("names"sv) != overload.npos);
}

// Note [Ops that write to what they do not declare]
// A schema marks what its op writes to (`Tensor(a!)`), but not every op keeps to that. Known, and
// looked for in every schema of the running LibTorch by tests/policy/undeclared_writes_test.cpp:
//  - Batch and instance norms update their running statistics, which an op need not have. These
//    ops can be cast, and their statistics are seen to by CastArguments.
//  - Ops whose name ends in an underscore write in place (c10d's collectives), those that return
//    nothing have no other way to have an effect, `dst` is what a copy goes to, and `qaccum` is
//    what oneDNN's fused convolutions add to. None of these can be cast.

/// Whether an op updates the argument without saying so.
inline bool is_running_statistic(const c10::Argument& argument) {
  return argument.name().starts_with("running_") || argument.name().starts_with("moving_");
}

/// Whether the op writes to an argument other than running statistics.
inline bool writes_to_argument(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name();
  if (schema.is_mutable()) return true;
  if (name.ends_with('_') && !name.ends_with("__")) return true;
  for (const auto& argument : schema.arguments()) {
    if (argument.name() == "dst"sv || argument.name() == "qaccum"sv) return true;
  }
  return false;
}

/// Why the tensor arguments of an op cannot be cast; empty if they can.
inline std::string_view why_not_castable(const c10::FunctionSchema& schema) {
  bool has_tensors = false;
  bool names_dtype = false;
  for (const auto& argument : schema.arguments()) {
    has_tensors = has_tensors || holds_tensors(*argument.type());
    names_dtype = names_dtype || is_dtype(argument, /*optional=*/false);
  }
  if (!has_tensors) return "it takes no tensors";
  if (writes_to_argument(schema)) {
    return "it writes to an argument (an in-place or out= form), which a cast would replace by a "
           "copy";
  }
  if (schema.returns().empty()) {
    return "it returns nothing, so what it does it does to its arguments, which a cast would "
           "replace by copies";
  }
  if (takes_named_dimensions(schema)) return "it takes named dimensions";
  if (names_dtype) return "the caller names its dtype";
  for (const auto& result : schema.returns()) {
    if (result.alias_info()) return "it returns a view of its argument, which a cast would cut off";
  }
  return {};
}

}  // namespace torchamp::detail
