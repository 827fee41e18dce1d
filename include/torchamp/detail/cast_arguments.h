// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "torchamp/cast.h"
#include "torchamp/detail/value_tensors.h"

namespace torchamp::detail {

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
  const c10::Type* type = argument.real_type().get();
  if (argument.name() != "dtype") return false;
  const bool is_optional = type->kind() == c10::TypeKind::OptionalType;
  if (is_optional) type = type->castRaw<c10::OptionalType>()->getElementType().get();
  return is_optional == optional && type->kind() == c10::TypeKind::ScalarTypeType;
}

/// Why the tensor arguments of an op cannot be cast; empty if they can.
inline std::string why_not_castable(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) {
    return "it writes to an argument (an in-place or out= form), which a cast would replace by a "
           "copy";
  }
  // LibTorch cannot box Dimname, and an overlay is a boxed kernel.
  const std::string& overload = schema.overload_name();
  if (overload.find("imname") != std::string::npos || overload.find("names") != std::string::npos) {
    return "it takes named dimensions, which LibTorch's dispatcher cannot pass on";
  }
  bool has_tensors = false;
  for (const auto& argument : schema.arguments()) {
    has_tensors = has_tensors || holds_tensors(*argument.type());
    if (is_dtype(argument, /*optional=*/false)) return "the caller names its dtype";
  }
  if (!has_tensors) return "it takes no tensors";
  for (const auto& result : schema.returns()) {
    if (result.alias_info()) return "it returns a view of its argument, which a cast would cut off";
  }
  return {};
}

/// Casts the arguments of one op on the interpreter's stack. Made once per op, from its schema.
class CastArguments {
 public:
  /// `promotes`: the op itself computes in the widest dtype of its arguments, as additions do.
  CastArguments(const c10::FunctionSchema& schema, bool promotes)
      : count_(schema.arguments().size()), promotes_(promotes) {
    for (std::size_t i = 0; i < count_; ++i) {
      const auto& argument = schema.arguments()[i];
      if (holds_tensors(*argument.type())) positions_.push_back(i);
      if (is_dtype(argument, /*optional=*/true)) dtype_position_ = i;
    }
  }

  /// Casts as `cast` says (lower_precision, fp32 or promote) for a region of `device`.
  void operator()(Cast cast, at::DeviceType device, torch::jit::Stack& stack) const {
    const std::size_t first = stack.size() - count_;
    switch (cast) {
      case Cast::lower_precision:
        return to(at::autocast::get_autocast_dtype(device), device, stack, first);
      case Cast::promote:
        return to(widest(device, stack, first), device, stack, first);
      case Cast::fp32:
        if (dtype_position_) return ask_for_fp32(device, stack, first);
        if (promotes_) return widen_one(device, stack, first);
        return to(at::kFloat, device, stack, first);
      case Cast::native:
      case Cast::unchanged:
        return;
    }
  }

 private:
  template <class Function>
  void for_each_tensor(const torch::jit::Stack& stack, std::size_t first, Function function) const {
    for (const std::size_t position : positions_) {
      for_each_tensor_of(stack[first + position], function);
    }
  }

  void to(at::ScalarType dtype, at::DeviceType device, torch::jit::Stack& stack,
          std::size_t first) const {
    const auto cast = [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, device);
    };
    for (const std::size_t position : positions_) {
      c10::IValue& value = stack[first + position];
      if (value.isTensor()) {
        if (needs_cast(value.toTensor(), dtype, device)) value = cast(value.toTensor());
      } else if (value.isList()) {
        c10::impl::GenericList list = value.toList().copy();  // keeps the type of its elements
        for (std::size_t i = 0; i < list.size(); ++i) {
          const c10::IValue element = list.get(i);
          if (element.isTensor()) list.set(i, cast(element.toTensor()));
        }
        value = std::move(list);
      }
    }
  }

  static bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype, at::DeviceType device) {
    return at::autocast::is_eligible(tensor, device) && tensor.scalar_type() != dtype;
  }

  // LibTorch's rule for `promote`, with its errors.
  at::ScalarType widest(at::DeviceType device, const torch::jit::Stack& stack,
                        std::size_t first) const {
    at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    for_each_tensor(stack, first, [&](const at::Tensor& tensor) {
      if (tensor.defined()) dtype = at::autocast::prioritize(dtype, tensor, device);
    });
    return dtype;
  }

  // LibTorch's rule for `fp32_set_opt_dtype`: a dtype that the caller gave stands.
  void ask_for_fp32(at::DeviceType device, torch::jit::Stack& stack, std::size_t first) const {
    c10::IValue& dtype = stack[first + *dtype_position_];
    const c10::IValue& leading = stack[first + positions_.front()];
    if (dtype.isNone() && leading.isTensor() &&
        at::autocast::is_eligible(leading.toTensor(), device)) {
      dtype = at::kFloat;
    }
  }

  // Note [One cast for an addition]
  // An op with type promotion computes in fp32 as soon as one argument that decides the dtype is
  // fp32, and converts the other on the fly. Tensors with dimensions decide over those without. So
  // one cast serves where a cast of each argument would launch two kernels.
  void widen_one(at::DeviceType device, torch::jit::Stack& stack, std::size_t first) const {
    c10::IValue* chosen = nullptr;
    bool chosen_has_dims = false;
    bool wide = false;
    for (const std::size_t position : positions_) {
      c10::IValue& value = stack[first + position];
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.is_floating_point()) continue;
      const bool has_dims = tensor.dim() > 0;
      if (chosen && has_dims < chosen_has_dims) continue;
      if (!chosen || has_dims > chosen_has_dims) {
        chosen = &value;
        chosen_has_dims = has_dims;
        wide = false;
      }
      wide = wide || tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
    }
    if (chosen && !wide)
      *chosen = at::autocast::cached_cast(at::kFloat, chosen->toTensor(), device);
  }

  std::vector<std::size_t> positions_;  // of the arguments that hold tensors
  std::optional<std::size_t> dtype_position_;
  std::size_t count_;
  bool promotes_;
};

}  // namespace torchamp::detail
