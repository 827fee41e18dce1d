// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The tensors that a scaler has made and that are still in use, to tell a loss that is scaled
/// twice. Known by identity alone: what is computed from one of them (its sum with another, its
/// gradients for a penalty) is not taken for it. Keeps none of them alive.
class ScaledOutputs {
 public:
  void check_not_in(const at::Tensor& output, const char* call) const {
    if (scaled_.empty()) return;
    const bool known = std::ranges::find(scaled_, weak(output)) != scaled_.end();
    TORCH_CHECK_VALUE(!known, call,
                      ": this tensor has been scaled already, and its gradients would be too large "
                      "by the scale. Pass the loss as it was before scale().");
  }

  void add(const at::Tensor& scaled) {
    std::erase_if(scaled_, [](const Weak& tensor) { return tensor.expired(); });
    scaled_.push_back(weak(scaled));
  }

 private:
  // While it exists, no other tensor can have that one's address.
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static Weak weak(const at::Tensor& tensor) { return Weak(tensor.getIntrusivePtr()); }

  std::vector<Weak> scaled_;
};

}  // namespace torchamp::detail
