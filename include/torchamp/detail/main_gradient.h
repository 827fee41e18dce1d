// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "torchamp/detail/split_weight.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Main gradients]
// LibTorch's node that accumulates a weight's gradient calls a hook when it has done so. With
// MasterWeightsOptions::main_gradients that hook adds the 16-bit gradient to the fp32 one and drops
// it, so that there is one 16-bit gradient at a time. Where the weight is split, the fp32 gradient
// is the weight's own, and all but the first are added to it by that node itself.

/// Adds `gradient`, of 16 bits, to `sum`, in fp32 and laid out as `like`.
inline void add_to_main(at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& like) {
  if (gradient.layout() != at::kStrided) {
    sum = sum.defined() ? sum + gradient.to(at::kFloat) : gradient.to(at::kFloat);
  } else if (!sum.defined()) {
    sum = at::empty_like(like, like.options().dtype(at::kFloat).requires_grad(false));
    sum.copy_(gradient);
  } else if (sum.layout() != at::kStrided) {
    sum = gradient.to(at::kFloat) + sum;
  } else {
    sum.add_(gradient);
  }
}

/// Where a weight's fp32 gradient is.
class MainGradient {
 public:
  /// `master` is undefined where the weight is split, or needed no gradient. It is not kept alive.
  MainGradient(std::string name, const at::Tensor& master)
      : name_(std::move(name)), has_master_(master.defined()) {
    if (!has_master_) return;
    master_ = WeakTensor(master.getIntrusivePtr());
    note_copied(master);
  }

  /// The model has the master's value.
  void note_copied(const at::Tensor& master) { copied_ = version_of(master); }

  /// The tensor that has the fp32 gradient: the master or the weight itself. Undefined if the
  /// master is gone.
  at::Tensor owner(const at::Tensor& weight) const {
    if (!has_master_) return weight;
    auto master = master_.lock();
    return master ? at::Tensor(std::move(master)) : at::Tensor();
  }

  /// Takes what backward has put into the weight's gradient.
  void take(const at::Tensor& weight) const {
    const InternalOps internal;
    SplitWeight* const split = split_of(weight);
    const at::Tensor owner = this->owner(weight);
    const at::Tensor gradient = weight.unsafeGetTensorImpl()->grad();
    if (!owner.defined() || !gradient.defined()) return;
    const auto where = [&] { return c10::str("backward: the weight '", name_, "'"); };
    TORCH_CHECK(has_master_ || split, where(),
                " has a gradient and no master. It needed no gradient when the MasterWeights were "
                "made; make them after unfreezing it.");
    TORCH_CHECK(!has_master_ || version_of(owner) == copied_, where(),
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
      add_to_main(owner.mutable_grad(), gradient, owner);
      weight.mutable_grad().reset();
    }
  }

  /// Called after each take() until it is set to nothing.
  std::function<void()> when_taken;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::string name_;
  bool has_master_;
  WeakTensor master_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  uint32_t copied_ = 0;  // the version of the master whose value the model has
};

/// Has backward take a weight's gradients.
class MainGradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit MainGradientHook(std::shared_ptr<MainGradient> main) : main_(std::move(main)) {}
  void operator()(const at::Tensor& weight) override {
    main_->take(weight);
    if (main_->when_taken) main_->when_taken();
  }
  const std::shared_ptr<MainGradient>& main() const { return main_; }

 private:
  std::shared_ptr<MainGradient> main_;
};

/// Called when backward has accumulated the gradient; null if there is none.
inline torch::autograd::PostAccumulateGradHook* hook_of(const at::Tensor& weight) {
  namespace impl = torch::autograd::impl;
  return impl::get_autograd_meta(weight) ? impl::post_acc_grad_hooks(weight).get() : nullptr;
}

/// Null for a weight without a hook of ours.
inline std::shared_ptr<MainGradient> main_gradient_of(const at::Tensor& weight) {
  const auto* const ours = dynamic_cast<const MainGradientHook*>(hook_of(weight));
  return ours ? ours->main() : nullptr;
}

/// Whether a DistributedDataParallel averages the weight's main gradients.
inline bool is_averaged(const at::Tensor& weight) {
  const auto main = main_gradient_of(weight);
  return main && main->when_taken;
}

/// Whether a hook of somebody else's is in the only place that there is.
inline bool has_other_hook(const at::Tensor& weight) {
  return hook_of(weight) && !main_gradient_of(weight);
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

}  // namespace torchamp::detail
