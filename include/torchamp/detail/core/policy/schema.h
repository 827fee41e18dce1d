// SPDX-License-Identifier: BSD-3-Clause
// LibTorch's ops by name, and properties of their arguments from their schemas.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// ---- Names --------------------------------------------------------------------------------------

/// "aten::add.Tensor", as c10::toString() writes it through a stream, ten times as slowly.
inline std::string full_name(const c10::OperatorName& op) {
  return op.overload_name.empty() ? op.name : op.name + '.' + op.overload_name;
}

/// "add" of "aten::add"; empty for ops that are not LibTorch's.
inline std::string_view base_of(const c10::OperatorName& op) {
  const std::string_view name = op.name;
  return name.starts_with("aten::") ? name.substr(6) : std::string_view();
}

/// (std::find compares four names at a time, in four times the code.)
inline bool is_among(const auto& names, std::string_view name) {
  for (const std::string_view one : names) {
    if (one == name) return true;
  }
  return false;
}

/// Whether the family has the op, whatever its overload.
inline bool contains(const OpFamily& family, const c10::OperatorName& op) {
  return is_among(family, base_of(op));
}

/// Handles of all ops that are registered now.
std::vector<c10::OperatorHandle> all_ops();

/// Handles of the overloads that `text` names, by their names. Without any: an error naming `call`,
/// the op and the nearest known name; or nothing, if `missing_ok`. Any thread.
std::vector<c10::OperatorHandle> find_ops(std::string_view text, std::string_view call,
                                          bool missing_ok = false);

// ---- Schemas ------------------------------------------------------------------------------------

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

/// Whether the op takes named dimensions, which newer LibTorchs do not have. Tables do not cast it.
inline bool takes_named_dimensions(const c10::FunctionSchema& schema) {
  const std::string_view overload = schema.overload_name();
  return overload.find("imname"sv) != overload.npos || overload.find("names"sv) != overload.npos;
}

/// Calls `function` with each tensor that an argument or result of an op holds (`Tensor`,
/// `Tensor[]`, `Tensor?[]`), undefined ones included.
template <class Function>
void for_each_tensor_of(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) function(element.toTensor());
    }
  }
}

// Note [Ops that write to what they do not declare]
// A schema marks the arguments that its op writes (`Tensor(a!)`), but some ops also write other
// arguments. tests/internals/undeclared_writes_test.cpp searches every schema of the running
// LibTorch. Known ops:
//  - Batch and instance norms update their running statistics: see CastArguments.
//  - Ops whose name ends in an underscore (c10d's collectives), ops that return nothing, and those
//    with `dst` (of a copy) or `qaccum` (oneDNN's fused convolutions). None of these can be cast.

/// Whether an op updates the argument although its schema does not declare it.
inline bool is_running_statistic(const c10::Argument& argument) {
  return argument.name().starts_with("running_") || argument.name().starts_with("moving_");
}

/// Arguments that a cast treats in a special way.
enum class ArgumentRole : std::uint8_t {
  none,
  in_fp32_only,     ///< never cast
  is_training,      ///< whether the op updates its running statistics
  chooses_sum,      ///< whether the op adds: a bool, or the name of a reduction
  makes_sparse,     ///< whether gradients are sparse
  optional_weight,  ///< without it, the op narrows its running statistics
};

/// The role of an argument of this name: in all ops, or in one.
struct ArgumentRow {
  std::string_view name;
  ArgumentRole role;
  std::string_view op = {};
};
inline constexpr ArgumentRow argument_rows[] = {
    {"alibi_slopes"sv, ArgumentRole::in_fp32_only},  // of flash attention
    {"training"sv, ArgumentRole::is_training},
    {"use_input_stats"sv, ArgumentRole::is_training},
    {"accumulate"sv, ArgumentRole::chooses_sum},
    {"reduce"sv, ArgumentRole::chooses_sum},
    {"sparse"sv, ArgumentRole::makes_sparse},
    {"weight"sv, ArgumentRole::optional_weight, "aten::instance_norm"sv},
};

/// The role of an op's argument.
inline ArgumentRole role_of(const c10::Argument& argument, const c10::FunctionSchema& schema) {
  for (const ArgumentRow& row : argument_rows) {
    if (row.name == argument.name() && (row.op.empty() || row.op == schema.name())) return row.role;
  }
  return ArgumentRole::none;
}

/// Why the tensor arguments of an op cannot be cast; empty if they can.
std::string_view why_not_castable(const c10::FunctionSchema& schema);

// ---- Kernels ------------------------------------------------------------------------------------

/// Whether there is a kernel for the op under a device's autocast key.
inline bool has_autocast_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  const c10::DispatchKey key = autocast_key(device);
  return op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key);
}

/// Whether LibTorch has one, even if torchamp's kernel has replaced it.
inline bool has_native_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  if (!has_autocast_kernel(op, device)) return false;
  SharedRuntime& runtime = shared_runtime();
  const auto& kernels = runtime.kernels[device_index(device, "has_native_kernel")];
  const std::scoped_lock lock(runtime.mutex);
  const auto kernel = kernels.find(op.operator_name());
  return kernel == kernels.end() || kernel->second.has_native;
}

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/policy/schema-inl.h"  // IWYU pragma: export
#endif
