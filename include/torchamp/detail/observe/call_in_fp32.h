// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <exception>
#include <optional>
#include <vector>

#include "torchamp/detail/observe/recorded_op.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Whether an op takes a dtype there, or may.
inline bool takes_dtype(const c10::Argument& argument) {
  const c10::Type* type = argument.real_type().get();
  if (type->kind() == c10::TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType().get();
  }
  return type->kind() == c10::TypeKind::ScalarTypeType;
}

// Note [Which calls are made twice]
// A call of ATen's, made again on copies of what it writes to, has no effect but its results. That
// is not so of ops that draw random numbers, and not known of other libraries' ops: a collective of
// c10d made twice by one process waits for the others for good.

/// Whether a call of this op can be made again without an effect on the program.
inline bool can_be_made_twice(const c10::OperatorHandle& op) {
  return op.operator_name().name.starts_with("aten::") &&
         !op.hasTag(at::Tag::nondeterministic_seeded);
}

/// What the op gives in fp32 for the same arguments, which stay as they are: those in 16 bits, and
/// results that are asked for in 16 bits, become fp32. Floating-point results in order; nothing if
/// it cannot run so.
inline std::optional<std::vector<at::Tensor>> results_in_fp32(
    const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> arguments) {
  try {
    const c10::FunctionSchema& schema = op.schema();
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      const bool is_written = schema.is_mutable() || is_running_statistic(argument);
      stack.push_back(with_tensors_changed(arguments[i], [&](const at::Tensor& tensor) {
        if (is_16_bit(tensor.scalar_type())) return tensor.to(at::kFloat);
        return is_written ? tensor.clone() : tensor;
      }));
      if (stack.back().isInt() && takes_dtype(argument) &&
          is_16_bit(static_cast<at::ScalarType>(stack.back().toInt()))) {
        stack.back() = at::kFloat;
      }
    }
    op.callBoxed(stack);
    std::vector<at::Tensor> results;
    for_each_floating_tensor(stack, [&](const at::Tensor& tensor) { results.push_back(tensor); });
    return results;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace torchamp::detail
