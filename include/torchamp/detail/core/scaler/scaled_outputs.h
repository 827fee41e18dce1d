// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// The tensors that a scaler has made and that are still in use, to tell a loss that is scaled
/// twice. Known by identity alone: what is computed from one of them (its sum with another, its
/// gradients for a penalty) is not taken for it. Keeps none of them alive.
class ScaledOutputs {
 public:
  void check_not_in(const at::Tensor& output, const char* call) const {
    for (const Scaled& scaled : scaled_) {
      TORCHAMP_CHECK_VALUE(!scaled.tensor.is(output), call,
                           ": this tensor has been scaled already, and its gradients would be too "
                           "large by the scale. Pass the loss as it was before scale().");
    }
  }

  /// Forgets those that are gone, except for the last few, which are_made_by() knows.
  void add(const at::Tensor& scaled) {
    const auto is_gone = [](const Scaled& one) { return one.tensor.is_gone(); };
    const auto last_few = scaled_.end() - std::min(std::ssize(scaled_), few);
    scaled_.erase(std::remove_if(scaled_.begin(), last_few, is_gone), last_few);
    const auto& node = scaled.grad_fn();
    scaled_.push_back({WeakTensor(scaled), node.get(), node ? node->sequence_nr() : 0});
  }

  /// Whether `node` has made one of the last few, which may be gone.
  bool are_made_by(const torch::autograd::Node& node) const {
    return std::any_of(scaled_.begin(), scaled_.end(), [&](const Scaled& one) {
      return one.maker == &node && one.sequence == node.sequence_nr();
    });
  }

 private:
  struct Scaled {
    WeakTensor tensor;
    const torch::autograd::Node* maker;
    uint64_t sequence;  // one at the same address has another number
  };
  static constexpr std::ptrdiff_t few = 7;

  std::vector<Scaled> scaled_;
};

}  // namespace torchamp::detail
