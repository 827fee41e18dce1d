// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
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
// write to weights itself, so these are not told:
//
//   one weight                     an adversarial input, which only the gradient's sign changes
//   weights that no earlier        such inputs of this batch
//   iteration trained
//   gradients that nobody clears   a teacher that averages weights, and is not detached
//   gradients of the program's     those that a backward(inputs) has left alone
//   copies of the scaler's weights replicas, each with a part of the batch
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

  /// A weight, with the gradient of a scaled loss.
  struct Scaled {
    SeenTensor weight, gradient;
    bool is_of_this_iteration = false, is_of_earlier_iteration = false;
    bool was_cleared = false;  ///< or written to in another way, before the next backward
  };

  /// Whether all weights that this iteration's scaled losses are computed from are fp64, and one of
  /// them is a matrix.
  bool all_fp64() const { return any_matrix_ && all_fp64_; }

  /// The weights that `scaled` is computed from.
  TORCHAMP_RARE void add_leaves(const at::Tensor& scaled) {
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
        any_matrix_ = any_matrix_ || weight.dim() >= 2;
        all_fp64_ = all_fp64_ && weight.scalar_type() == at::kDouble;
        const bool is_wide =
            weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kDouble;
        const bool is_new = reached_.insert(weight.unsafeGetTensorImpl()).second;
        if (is_new && is_wide && !weight_meta_of(weight)) leaves_.emplace_back(weight);
      }
      for (const torch::autograd::Edge& edge : node->next_edges()) add(edge.function.get());
    }
  }

  /// The backward of a scaled loss begins: the weights, and the gradients that they have.
  TORCHAMP_RARE std::vector<Scaled> begin_backward() {
    std::vector<Scaled> at_begin;
    for (const WeakTensor& leaf : leaves_) {
      const at::Tensor weight = leaf.lock();
      if (!weight.defined()) continue;
      const auto known = scaled_.find(leaf.address());
      if (known != scaled_.end() && !known->second.gradient.is_unchanged(gradient_of(weight))) {
        known->second.was_cleared = true;
      }
      at_begin.push_back({SeenTensor(weight), SeenTensor(gradient_of(weight))});
    }
    return at_begin;
  }

  /// It has ended.
  TORCHAMP_RARE void end_backward(const std::vector<Scaled>& at_begin) {
    if (leaves_.empty()) return;  // the iteration has ended before
    for (const Scaled& before : at_begin) {
      const at::Tensor weight = before.weight.lock();
      const at::Tensor gradient = weight.defined() ? gradient_of(weight) : at::Tensor();
      if (!gradient.defined()) continue;
      const auto known = scaled_.try_emplace(before.weight.address(), before).first;
      Scaled& one = known->second;
      const bool is_of_earlier_backward =
          one.is_of_this_iteration && one.gradient.is_unchanged(gradient);
      if (!is_of_earlier_backward && before.gradient.is_unchanged(gradient)) continue;
      one.weight = SeenTensor(weight);
      one.gradient = SeenTensor(gradient);
      one.is_of_this_iteration = true;
    }
  }

  /// Whether two weights were stepped with scaled gradients, by no scaler. `ours`: what this one's
  /// optimizers have left.
  TORCHAMP_RARE bool end_iteration(const UnscaledGradients& ours) {
    if (!is_looking() || reached_.empty()) return false;
    --iterations_left_;
    std::vector<at::Tensor> written;
    for (auto& [address, one] : scaled_) {
      const at::Tensor weight = one.weight.lock();
      const bool is_trained =
          one.is_of_this_iteration && one.is_of_earlier_iteration && one.was_cleared;
      if (is_trained && weight.defined() && !one.weight.is_unchanged(weight) &&
          one.gradient.is_unchanged(gradient_of(weight)) && !SteppedWeights::contains(weight)) {
        written.push_back(weight);
      }
      one.is_of_earlier_iteration |= std::exchange(one.is_of_this_iteration, false);
    }
    const bool stepped = written.size() >= 2 && !moves_gradients(ours) &&
                         !is_copy(written[0], ours) && !is_copy(written[1], ours);
    leaves_.clear();
    reached_.clear();
    any_matrix_ = false;
    all_fp64_ = true;
    if (stepped) iterations_left_ = 0;
    if (!is_looking()) scaled_.clear();
    return stepped;
  }

 private:
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

  /// Whether `weight` has the values of one that an optimizer of `ours` steps. Reads a device, once
  /// in a scaler's life, before a warning; in a graph's body, which cannot, it is taken for a copy.
  TORCHAMP_RARE static bool is_copy(const at::Tensor& weight, const UnscaledGradients& ours) {
    const InternalOps guard;
    bool is = GraphBody::is_running();
    ours.for_each([&](const UnscaledGradients::Name&, const UnscaledGradients::Left& left) {
      const at::Tensor own = is ? at::Tensor() : left.parameter.lock();
      is = is || (own.defined() && own.layout() == at::kStrided &&
                  weight.layout() == at::kStrided && own.sizes() == weight.sizes() &&
                  at::equal(own.to(weight.device(), weight.scalar_type()), weight));
    });
    return is;
  }

  int iterations_left_ = 2;
  std::vector<WeakTensor> leaves_;
  std::unordered_set<const c10::TensorImpl*> reached_;  // those, and the others of the graphs
  std::unordered_map<const c10::TensorImpl*, Scaled> scaled_;  // those that have a gradient
  bool any_matrix_ = false, all_fp64_ = true;                  // among all that were reached
};

}  // namespace torchamp::detail
