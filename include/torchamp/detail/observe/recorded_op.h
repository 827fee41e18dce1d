// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/resolve.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {
/// What a recording has to know of one op overload, whatever its arguments.
struct RecordedOp {
  c10::OperatorHandle handle;
  std::string full_name;  // "aten::add.Tensor"
  std::string label;      // "add.Tensor", as a Policy takes it
  bool is_conversion;     // asks for another dtype: `to` and what it calls
  bool is_copy;           // into a tensor whose dtype is given
  bool computes;          // gives values of its own: no view, and no new tensor like another
  bool is_mutable;
  bool promotes;  // see Note [One cast for an addition]

  static std::optional<RecordedOp> of(const c10::OperatorName& name) {
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle) return std::nullopt;
    const std::string full = c10::toString(name);
    const c10::FunctionSchema& schema = handle->schema();
    bool is_view = false;
    for (const auto& result : schema.returns()) {
      is_view = is_view || (result.alias_info() != nullptr && !result.alias_info()->isWrite());
    }
    const std::string_view base = name.name;
    return RecordedOp{*handle,
                      full,
                      full.starts_with("aten::") ? full.substr(6) : full,
                      base == "aten::to" || base == "aten::_to_copy" || base == "aten::type_as" ||
                          base.starts_with("aten::_autocast_to_"),
                      base == "aten::copy_" || base == "aten::copy",
                      !is_view && !base.ends_with("_like") && !base.starts_with("aten::new_"),
                      schema.is_mutable(),
                      promotes_its_arguments(name)};
  }
};

/// What a recording keeps of a floating-point tensor that an op takes.
struct RecordedTensor {
  const c10::TensorImpl* tensor;
  const c10::StorageImpl* storage;  // null if it has none
  at::ScalarType dtype;
  at::DeviceType device;
  bool has_dims;
};

/// `value`, an argument of an op, with `function` of each defined tensor in its place.
template <class Function>
c10::IValue with_tensors_changed(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  }
  if (!value.isList()) return value;
  c10::impl::GenericList list = value.toList().copy();
  for (std::size_t i = 0; i < list.size(); ++i) {
    const c10::IValue& element = list.get(i);
    if (element.isTensor() && element.toTensor().defined()) {
      list.set(i, function(element.toTensor()));
    }
  }
  return list;
}

/// Calls `function` with each defined floating-point tensor in a list of arguments or results.
template <class Values, class Function>
void for_each_floating_tensor(const Values& values, const Function& function) {
  const auto one = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_floating_point()) function(tensor);
  };
  for (const c10::IValue& value : values) for_each_tensor_of(value, one);
}

/// Whether a promotion to fp32 is due to only some of the arguments: 16-bit ones are there too.
/// Tensors with dimensions decide over those without, except where autocast itself promotes.
inline bool has_16_bit_and_fp32(const std::vector<RecordedTensor>& arguments, bool all_decide) {
  bool dims = false;
  for (const auto& argument : arguments) dims = dims || argument.has_dims;
  bool narrow = false;
  bool wide = false;
  for (const auto& argument : arguments) {
    if (dims && !argument.has_dims && !all_decide) continue;
    narrow = narrow || is_16_bit(argument.dtype);
    wide = wide || argument.dtype == at::kFloat;
  }
  return narrow && wide;
}

}  // namespace torchamp::detail
