// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torchamp/detail/core/check_order/order_check.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [A step without the scaler]
// optimizer.step() in place of scaler.step(optimizer) steps with scaled gradients. The scaler has
// no reference to such an optimizer. But the graphs of the scaled losses show which weights are
// trained. So update() detects weights that were written although no optimizer of the scaler has
// stepped them, while the gradient of the scaled loss is unchanged. A program may also write to
// weights itself, so these do not count:
//
//   one weight                     an adversarial input, which only the gradient's sign changes
//   weights that no earlier        such inputs of this batch
//   iteration trained
//   gradients that nobody clears   a teacher that averages weights, and is not detached
//   gradients of the program's     gradients that a backward(inputs) has not changed
//   copies of the scaler's weights replicas, each with a part of the batch
//   weights of another scaler's    a critic that is clamped after the generator's scaled loss went
//   optimizer, or of this one's    through it
//   in an earlier iteration
//   gradients moved by hand        the scaler steps weights that no scaled loss was computed from:
//                                  masters, or a model that several threads share, whose values
//                                  then are copied back
//
// (LibTorch's own SGD writes through data(), which leaves no trace.)

/// The weights of optimizers that scalers of this process have stepped in their first iterations.
/// They are identified by their memory, because even a weak reference to a tensor keeps data that
/// is attached to it.
class SteppedWeights {
 public:
  static void note(const torch::optim::Optimizer& optimizer) {
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

/// The weights that `scaled` is computed from.
TORCHAMP_BODY void OrderCheck::add_leaves(const at::Tensor& scaled) {
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
      const bool is_new = reached_.insert(weight.unsafeGetTensorImpl()).second;
      if (is_new) leaves_.emplace_back(weight);
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) add(edge.function.get());
  }
}

/// Whether an optimizer of the scaler has a gradient that comes from no scaled loss of its weight.
/// (Not for masters: MasterWeights moves their gradients.)
inline bool OrderCheck::moves_gradients() const {
  for (const Handled& one : handled_) {
    for (std::size_t i = 0; i < one.gradients.size(); ++i) {
      const at::Tensor weight = one.parameters[i].lock();
      if (weight.defined() && one.gradients[i].was_defined() && !weight_meta_of(weight) &&
          !reached_.contains(one.parameters[i].address())) {
        return true;
      }
    }
  }
  return false;
}

/// Whether `weight` has the values of one that an optimizer of the scaler steps. Reads a device,
/// once in a scaler's life, before a warning.
TORCHAMP_BODY bool OrderCheck::is_copy(const at::Tensor& weight) const {
  const InternalOps guard;
  for (const Handled& one : handled_) {
    for (const TensorSnapshot& parameter : one.parameters) {
      const at::Tensor own = parameter.lock();
      if (own.defined() && own.layout() == at::kStrided && weight.layout() == at::kStrided &&
          own.sizes() == weight.sizes() &&
          at::equal(own.to(weight.device(), weight.scalar_type()), weight)) {
        return true;
      }
    }
  }
  return false;
}

TORCHAMP_BODY bool OrderCheck::steps_beside(const Moment& moment) const {
  if (moment.knows_scale || moment.is_fixed) return false;
  std::vector<at::Tensor> written;
  for (const auto& [address, one] : trained_) {
    const at::Tensor weight = one.weight.lock();
    const bool is_trained = one.in_this_iteration && one.in_earlier_iteration && one.was_cleared;
    if (is_trained && weight.defined() && !one.weight.is_same(weight) &&
        one.gradient.is_same(gradient_of(weight)) && !SteppedWeights::contains(weight)) {
      written.push_back(weight);
    }
  }
  return written.size() >= 2 && !moves_gradients() && !is_copy(written[0]) && !is_copy(written[1]);
}

}  // namespace TORCHAMP_NAMESPACE::detail
