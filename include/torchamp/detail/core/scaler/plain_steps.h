// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <unordered_map>
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
// optimizer of the scaler's, while the gradient of the scaled loss stayed as it was. A program may
// write to weights itself, so three things are not told:
//
//   one weight                     an adversarial input, which only the gradient's sign changes
//   weights of another scaler's    a critic that is clamped after the generator's scaled loss went
//   optimizer, or of this one's    through it
//   in an earlier iteration
//   gradients moved by hand        the scaler steps weights that no scaled loss was computed from:
//                                  masters, or a model that several threads share, whose values
//                                  then are copied back
//
// This costs a walk through a graph, so it is done in a scaler's first iterations alone. (What it
// cannot see: LibTorch's own SGD writes through data(), which leaves no trace.)

/// The weights of optimizers that scalers of this process have stepped in their first iterations.
/// Known by their memory: a reference to a tensor, even a weak one, keeps what is attached to it.
class SteppedWeights {
 public:
  TORCHAMP_RARE static void note(const torch::optim::Optimizer& optimizer) {
    SteppedWeights& all = instance();
    const std::scoped_lock lock(all.mutex_);
    std::erase_if(all.memory_, [](const auto& one) { return one.second.is_gone(); });
    any_parameter(optimizer, [&](const at::Tensor& weight) {
      if (weight.has_storage()) all.memory_.try_emplace(storage_of(weight), weight);
      return false;
    });
  }
  static bool contains(const at::Tensor& weight) {
    SteppedWeights& all = instance();
    const std::scoped_lock lock(all.mutex_);
    return all.memory_.contains(storage_of(weight));
  }

 private:
  /// Never destroyed, since a static scaler may step after others are.
  static SteppedWeights& instance() {
    static auto& all = *new SteppedWeights;
    return all;
  }

  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, WeakMemory> memory_;
};

/// Looks for optimizers that are stepped without the scaler in its first iterations.
class PlainSteps {
 public:
  /// Whether there is something left to do.
  bool is_looking() const { return iterations_left_ > 0; }

  /// The weights that `scaled` is computed from. Whether there is a matrix, and all are fp64.
  TORCHAMP_RARE bool add_leaves(const at::Tensor& scaled) {
    bool any_matrix = false, all_fp64 = true;
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
        any_matrix = any_matrix || weight.dim() >= 2;
        all_fp64 = all_fp64 && weight.scalar_type() == at::kDouble;
        const bool is_wide =
            weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kDouble;
        const bool is_new = reached_.insert(weight.unsafeGetTensorImpl()).second;
        if (is_new && is_wide && !weight_meta_of(weight)) leaves_.emplace_back(weight);
      }
      for (const torch::autograd::Edge& edge : node->next_edges()) add(edge.function.get());
    }
    return any_matrix && all_fp64;
  }

  /// The backward of a scaled loss has ended.
  TORCHAMP_RARE void note_gradients() {
    scaled_.clear();
    for (const WeakTensor& leaf : leaves_) {
      const at::Tensor weight = leaf.lock();
      const at::Tensor gradient = weight.defined() ? gradient_of(weight) : at::Tensor();
      if (gradient.defined()) scaled_.push_back({SeenTensor(weight), SeenTensor(gradient)});
    }
  }

  /// Whether two weights were stepped with scaled gradients, by no scaler. `ours`: what this one's
  /// optimizers have left.
  TORCHAMP_RARE bool end_iteration(const UnscaledGradients& ours) {
    if (!is_looking() || leaves_.empty()) return false;
    --iterations_left_;
    const auto was_stepped = [](const Scaled& one) {
      const at::Tensor weight = one.weight.lock();
      return weight.defined() && !one.weight.is_unchanged(weight) &&
             one.gradient.is_unchanged(gradient_of(weight)) && !SteppedWeights::contains(weight);
    };
    const bool stepped =
        !moves_gradients(ours) && std::count_if(scaled_.begin(), scaled_.end(), was_stepped) >= 2;
    leaves_.clear();
    reached_.clear();
    scaled_.clear();
    if (stepped) iterations_left_ = 0;
    return stepped;
  }

 private:
  struct Scaled {
    SeenTensor weight, gradient;
  };

  /// Whether an optimizer of `ours` has a gradient that no scaled loss has given its weight. (Of
  /// masters, MasterWeights knows.)
  bool moves_gradients(const UnscaledGradients& ours) const {
    bool moves = false;
    ours.for_each([&](const UnscaledGradients::Name&, const UnscaledGradients::Left& left) {
      const at::Tensor weight = left.parameter.lock();
      moves = moves || (weight.defined() && !left.gradient.is(at::Tensor()) &&
                        !weight_meta_of(weight) && !reached_.contains(left.parameter.address()));
    });
    return moves;
  }

  int iterations_left_ = 2;
  std::vector<WeakTensor> leaves_;
  std::unordered_set<const c10::TensorImpl*> reached_;  // those, and the others of the graphs
  std::vector<Scaled> scaled_;                          // those of them that have a gradient
};

}  // namespace torchamp::detail
