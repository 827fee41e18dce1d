// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/extras/masters/split_weight.h"
#include "torchamp/detail/extras/shared/master_gradients.h"
#include "torchamp/detail/extras/shared/master_meta.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Main gradients]
// LibTorch's node that accumulates a weight's gradient then calls a hook. With
// MasterWeightsOptions::main_gradients that hook adds the 16-bit gradient to the fp32 one and drops
// it, so only one 16-bit gradient exists at a time. If the weight is split, the fp32 gradient is
// the weight's own, and that node itself adds all but the first to it.

/// Finds a weight's fp32 gradient.
class MainGradient {
 public:
  /// `master` is undefined if the weight is split or does not require grad. It is not kept alive.
  MainGradient(std::string name, const at::Tensor& master) : name_(std::move(name)) {
    if (master.defined()) note_copied(master);
  }

  /// Whether a DistributedDataParallel averages the gradient.
  bool is_averaged = false;

  /// Records that the model has the master's value.
  void note_copied(const at::Tensor& master) { copied_ = TensorSnapshot(master); }
  /// Records that the master was stepped with its gradient, which must be cleared before the next
  /// backward.
  void note_stepped(const at::Tensor& master) {
    stepped_with_ = TensorSnapshot(gradient_of(master));
  }

  /// The tensor with the fp32 gradient: the master or the weight itself. Undefined if the master is
  /// destroyed.
  at::Tensor owner(const at::Tensor& weight) const {
    return copied_.was_defined() ? copied_.lock() : weight;
  }

  /// Adds the weight's 16-bit gradient to the fp32 gradient, and drops it.
  void take(const at::Tensor& weight) const {
    const InternalOps internal;
    SplitWeight* const split = split_of(weight);
    const at::Tensor owner = this->owner(weight);
    const at::Tensor gradient = weight.unsafeGetTensorImpl()->grad();
    if (!owner.defined() || !gradient.defined()) return;
    const auto where = [&] { return c10::str("backward: the weight '", name_, "'"); };
    TORCH_CHECK(copied_.was_defined() || split, where(),
                " has a gradient but no master: it did not require grad when the MasterWeights "
                "were made. Make them after unfreezing it.");
    TORCH_CHECK(!copied_.was_defined() || copied_.is_same(owner), where(),
                " was computed with old values: the optimizer has changed the master since. Call "
                "MasterWeights::copy_to_model() after each step, taken or skipped.");
    if (split) {
      check_split(weight, where);
      if (gradient.scalar_type() == at::kFloat) return;
      check_not_half_stepped(weight, where);
      split->note_taken();
      at::Tensor wide;
      add_to_main(wide, gradient, weight);
      weight.mutable_grad() = std::move(wide);
    } else {
      warn_of_kept_gradient(owner);
      add_to_main(owner.mutable_grad(), gradient, owner);
      weight.mutable_grad().reset();
    }
  }

 private:
  /// Warns once if the gradient is still the gradient of the last step.
  void warn_of_kept_gradient(const at::Tensor& owner) const {
    const bool is_kept = stepped_with_.was_defined() && stepped_with_.is_same(gradient_of(owner));
    stepped_with_ = {};
    if (!is_kept || std::exchange(warned_, true)) return;
    TORCH_WARN("backward: the master of the weight '", name_,
               "' still has the gradient of the last step, and the new one is added to it. The "
               "model's zero_grad() does not clear main gradients: call the masters' or the "
               "optimizer's zero_grad(). This warning is given once.");
  }

  std::string name_;
  TensorSnapshot copied_{};                // the master whose value the model has
  mutable TensorSnapshot stepped_with_{};  // the gradient, until the next backward
  mutable bool warned_ = false;
};

/// Makes backward take a weight's gradients. LibTorch stores one such hook per weight.
class MainGradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit MainGradientHook(std::shared_ptr<MainGradient> taken_by) : main(std::move(taken_by)) {}
  void operator()(const at::Tensor& weight) override { main->take(weight); }
  const std::shared_ptr<MainGradient> main;
};

/// Null for a weight whose gradients backward leaves in place.
inline std::shared_ptr<MainGradient> main_gradient_of(const at::Tensor& weight) {
  const auto* const ours = dynamic_cast<const MainGradientHook*>(hook_of(weight));
  return ours ? ours->main : nullptr;
}
inline std::shared_ptr<MainGradient> hook_main_gradient(std::string name, const at::Tensor& weight,
                                                        const at::Tensor& master) {
  auto main = std::make_shared<MainGradient>(std::move(name), master);
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<MainGradientHook>(main));
  return main;
}
inline void unhook_main_gradient(const at::Tensor& weight) {
  if (main_gradient_of(weight)) torch::autograd::impl::set_post_acc_grad_hooks(weight, nullptr);
}

// Operations of MasterWeights on weights, apart from steps; mostly for split ones.

inline void write_split(const at::Tensor& value, const at::Tensor& high, const at::Tensor& low) {
  if (value.numel() == 0) return;
  const at::Tensor wide = empty_fp32_like(high).copy_(value);
  SplitRuns whole(high.device());
  whole.add(in_memory_order(high.detach()), in_memory_order(low));
  whole.split(in_memory_order(wide));
}

/// Removes the data of destroyed MasterWeights.
inline void remove_weight_meta(const at::Tensor& parameter) {
  if (weight_meta_of(parameter)) parameter.unsafeGetTensorImpl()->set_backend_meta({});
}

/// Records in a model's weight that `masters` hold its master while they live, and whether as a
/// separate tensor. Does nothing for a weight with data that is specific to its device.
inline void note_masters(const at::Tensor& weight, const std::shared_ptr<const void>& masters,
                         bool apart) {
  c10::TensorImpl* const tensor = weight.unsafeGetTensorImpl();
  if (!tensor->get_backend_meta()) tensor->set_backend_meta(c10::make_intrusive<WeightMeta>());
  if (WeightMeta* const meta = weight_meta_of(weight)) {
    meta->masters = masters;
    meta->has_master_apart = apart;
  }
}

/// The parameters of a module, each once, by its first name.
inline std::vector<std::pair<std::string, at::Tensor>> named_parameters_once(
    const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& [name, parameter] : module.named_parameters().pairs()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second)
      parameters.emplace_back(name, parameter);
  }
  return parameters;
}

/// The state of a model's weight after its masters last wrote it.
class GivenWeight {
 public:
  void note(const at::Tensor& weight) {
    memory_ = memory_of(weight);
    writes_ = writes_of(weight);
  }
  /// Whether the weight has changed since. (If a program tries other weights, such as averages, and
  /// then restores these, it writes twice.)
  bool was_written(const at::Tensor& weight) const {
    return memory_ != memory_of(weight) || (writes_of(weight) - writes_) % 2 != 0;
  }

 private:
  static const void* memory_of(const at::Tensor& weight) {
    return weight.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl();
  }
  /// The number of writes that may have changed the weight.
  static uint32_t writes_of(const at::Tensor& weight) {
    const WeightMeta* const meta = weight_meta_of(weight);
    return version_of(weight) - (meta ? meta->same_writes : 0U);
  }

  const void* memory_ = nullptr;
  uint32_t writes_ = 0;
};

}  // namespace TORCHAMP_NAMESPACE::detail
