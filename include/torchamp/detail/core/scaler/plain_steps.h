// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstddef>
#include <unordered_set>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/scaler/shared_gradients.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [A step beside the scaler]
// optimizer.step() in place of scaler.step(optimizer) steps with gradients that are scaled. The
// scaler does not know such an optimizer, but the first losses that it scales tell, through their
// graphs, which weights are trained: an update() finds weights that were written to, by no
// optimizer of the scaler's, while the gradient of the scaled loss stayed as it was. One such
// weight may be an adversarial input, which only the gradient's sign changes; two are told.
//
// This costs a walk through a graph, so it is done in a scaler's first iterations alone. (What it
// cannot see: LibTorch's own SGD writes through data(), which leaves no trace.)

/// Looks for optimizers that are stepped without the scaler in its first iterations.
class PlainSteps {
 public:
  /// Whether there is something left to do.
  bool is_looking() const { return iterations_left_ > 0; }

  /// The weights that `scaled` is computed from. Whether there are some, all of them in fp64.
  bool add_leaves(const at::Tensor& scaled) {
    bool any = false, all_fp64 = true;
    constexpr std::size_t most = std::size_t{1} << 16;
    std::unordered_set<const torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> next;
    const auto add = [&](torch::autograd::Node* node) {
      if (node && seen.size() < most && seen.insert(node).second) next.push_back(node);
    };
    add(scaled.grad_fn().get());
    while (!next.empty()) {
      torch::autograd::Node* const node = next.back();
      next.pop_back();
      if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
        const at::Tensor& weight = leaf->variable;
        any = true;
        all_fp64 = all_fp64 && weight.scalar_type() == at::kDouble;
        const bool is_wide =
            weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kDouble;
        if (is_wide && !weight_meta_of(weight)) leaves_.emplace_back(weight);
      }
      for (const torch::autograd::Edge& edge : node->next_edges()) add(edge.function.get());
    }
    return any && all_fp64;
  }

  /// The backward of a scaled loss has ended.
  void note_gradients() {
    scaled_.clear();
    for (const WeakTensor& leaf : leaves_) {
      const at::Tensor weight = leaf.lock();
      const at::Tensor gradient = weight.defined() ? gradient_of(weight) : at::Tensor();
      if (gradient.defined()) scaled_.push_back({SeenTensor(weight), SeenTensor(gradient)});
    }
  }

  /// Whether two weights were stepped with scaled gradients, by none of the optimizers of `ours`.
  bool end_iteration(const UnscaledGradients& ours) {
    if (!is_looking() || leaves_.empty()) return false;
    --iterations_left_;
    std::unordered_set<const c10::TensorImpl*> known;
    ours.for_each([&](const UnscaledGradients::Name&, const UnscaledGradients::Left& left) {
      known.insert(left.parameter.address());
    });
    const auto stepped = std::count_if(scaled_.begin(), scaled_.end(), [&](const Scaled& one) {
      const at::Tensor weight = one.weight.lock();
      return weight.defined() && !known.contains(weight.unsafeGetTensorImpl()) &&
             !one.weight.is_unchanged(weight) && one.gradient.is_unchanged(gradient_of(weight));
    });
    leaves_.clear();
    scaled_.clear();
    if (stepped >= 2) iterations_left_ = 0;
    return stepped >= 2;
  }

 private:
  struct Scaled {
    SeenTensor weight, gradient;
  };

  int iterations_left_ = 2;
  std::vector<WeakTensor> leaves_;
  std::vector<Scaled> scaled_;  // those of them that have a gradient
};

}  // namespace torchamp::detail
