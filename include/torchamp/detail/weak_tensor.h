// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// A weak reference to a tensor. While it lives, no other tensor gets the address.
class WeakTensor {
 public:
  WeakTensor() = default;
  explicit WeakTensor(const at::TensorBase& tensor) : tensor_(tensor.getIntrusivePtr()) {}

  /// Undefined if it is destroyed.
  at::Tensor lock() const { return at::Tensor(tensor_.lock()); }
  bool is_gone() const { return tensor_.expired(); }
  const c10::TensorImpl* address() const { return tensor_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

}  // namespace torchamp::detail
