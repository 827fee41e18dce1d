// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "torchamp/version.h"

namespace torchamp::detail {

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

}  // namespace torchamp::detail
