// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

namespace simulated {

/// Calls f(tensor) for every tensor of an argument, and stores what it returns.
template <class F>
void for_each_tensor(c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(f(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
      list.push_back(t ? std::optional(f(*t)) : std::nullopt);
    }
    value = std::move(list);
  }
}

template <class F>
void look_at_each_tensor(const c10::IValue& value, F&& f) {
  c10::IValue copy = value;
  for_each_tensor(copy, [&](const at::Tensor& t) {
    f(t);
    return t;
  });
}

}  // namespace simulated
