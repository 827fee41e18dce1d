// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// A tensor that others keep alive. While this lives, its address is given to no other tensor.
class WeakTensor {
 public:
  WeakTensor() = default;
  explicit WeakTensor(const at::TensorBase& tensor) : tensor_(tensor.getIntrusivePtr()) {}

  /// Undefined if it is gone.
  at::Tensor lock() const { return at::Tensor(tensor_.lock()); }
  bool is_gone() const { return tensor_.expired(); }
  const c10::TensorImpl* address() const { return tensor_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

}  // namespace torchamp::detail
