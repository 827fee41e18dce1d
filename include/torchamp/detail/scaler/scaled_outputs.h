// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The tensors that a scaler has made and that are still in use, to tell a loss that is scaled
/// twice. Known by identity alone: what is computed from one of them (its sum with another, its
/// gradients for a penalty) is not taken for it. Keeps none of them alive.
class ScaledOutputs {
 public:
  void check_not_in(const at::Tensor& output, const char* call) const {
    for (const Weak& tensor : scaled_) {
      TORCH_CHECK_VALUE(
          tensor._unsafe_get_target() != output.unsafeGetTensorImpl(), call,
          ": this tensor has been scaled already, and its gradients would be too large by the "
          "scale. Pass the loss as it was before scale().");
    }
  }

  void add(const at::Tensor& scaled) {
    for (std::size_t i = scaled_.size(); i-- > 0;) {
      if (!scaled_[i].expired()) continue;
      scaled_[i].swap(scaled_.back());
      scaled_.pop_back();
    }
    scaled_.emplace_back(scaled.getIntrusivePtr());
    if (const auto& node = scaled.grad_fn()) {
      makers_[next_++ % makers_.size()] = {node.get(), node->sequence_nr()};
    }
  }

  /// Whether `node` has made one of the last few, which may be gone.
  bool are_made_by(const torch::autograd::Node& node) const {
    return std::any_of(makers_.begin(), makers_.end(), [&](const Maker& maker) {
      return maker.node == &node && maker.sequence == node.sequence_nr();
    });
  }

  /// Calls `f` with each of them.
  template <class F>
  void for_each(const F& f) const {
    for (const Weak& weak : scaled_) {
      if (auto tensor = weak.lock()) f(at::Tensor(std::move(tensor)));
    }
  }

 private:
  // While it exists, no other tensor can have that one's address.
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  // A node at the same address has another number.
  struct Maker {
    const torch::autograd::Node* node = nullptr;
    uint64_t sequence = 0;
  };

  std::vector<Weak> scaled_;
  std::array<Maker, 8> makers_{};
  std::size_t next_ = 0;
};

}  // namespace torchamp::detail
