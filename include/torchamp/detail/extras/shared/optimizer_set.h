// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/optimizer_identity.h"
#include "torchamp/scaled_step.h"

namespace TORCHAMP_NAMESPACE::detail {

using OptimizerPointers = std::vector<std::shared_ptr<torch::optim::Optimizer>>;

// Note [Several optimizers as one]
// For a scaler, a clip and an accumulation, several optimizers that step together are one optimizer
// with the parameters of all: it has one overflow flag and one norm, so either all members step or
// none. For this an OptimizerSet has copies of the members' groups. Options in these copies are not
// used; the members' own groups hold the options.

/// Several optimizers as one that steps all of them.
class OptimizerSet : public torch::optim::Optimizer, public NamedOptimizer {
 public:
  /// Errors: a parameter that is in two members, or twice in one member.
  explicit OptimizerSet(OptimizerPointers members)
      : Optimizer(ParamGroups(), std::make_unique<torch::optim::OptimizerOptions>()),
        members_(std::move(members)) {
    std::unordered_map<const c10::TensorImpl*, std::size_t> owners;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      any_parameter(*members_[i], [&](const at::Tensor& parameter) {
        const auto [owner, is_new] = owners.emplace(parameter.unsafeGetTensorImpl(), i);
        TORCH_CHECK_VALUE(is_new, "TrainingStep: a parameter of shape ", parameter.sizes(),
                          " is in the optimizers ", owner->second, " and ", i,
                          ". Give each parameter to one optimizer, once.");
        return false;
      });
    }
    update_groups();
  }

  const OptimizerPointers& members() const { return members_; }

  const char* name_in_errors() const final { return "the optimizers of a TrainingStep"; }

  /// Adds parameters that the program has added to members since.
  void update_groups() {
    if (has_all_parameters()) return;
    param_groups_.clear();
    for (const auto& member : members_) {
      for (const auto& group : member->param_groups()) param_groups_.push_back(group);
    }
  }

  at::Tensor step(LossClosure closure = nullptr) override {
    TORCH_INTERNAL_ASSERT(!closure, "TrainingStep: its optimizers take no closure");
    for (const auto& member : members_) member->step();
    return {};
  }

 private:
  bool has_all_parameters() const {
    std::size_t g = 0;
    for (const auto& member : members_) {
      for (const auto& group : member->param_groups()) {
        const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
        if (g == param_groups_.size()) return false;
        if (!std::ranges::equal(group.params(), param_groups_[g++].params(), is_same)) return false;
      }
    }
    return g == param_groups_.size();
  }

  OptimizerPointers members_;
};

/// A set of optimizers that divide and skip on the device.
class ScaledOptimizerSet final : public OptimizerSet, public ClippingStep, public CapturedStep {
 public:
  /// Errors: as OptimizerSet; a split weight in a member that is not fused.
  explicit ScaledOptimizerSet(OptimizerPointers members) : OptimizerSet(std::move(members)) {
    for (const auto& member : this->members()) {
      if (dynamic_cast<const ClippingStep*>(member.get())) continue;
      any_parameter(*member, [](const at::Tensor& parameter) {
        const WeightMeta* const meta = weight_meta_of(parameter);
        if (meta) meta->refuse_plain_step([] { return std::string("TrainingStep: a parameter"); });
        return false;
      });
    }
  }

  at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override {
    const at::Tensor divisor = deferred_clip_.pending_for_step(*this).times(grad_scale);
    for_each_step([&](ScaledStep& step) { step.step_scaled(divisor, found_inf); });
    deferred_clip_.forget();
    return {};
  }

  // Each member is called, even if an earlier member returns false.
  bool prepare_captured_step() override {
    bool is_as_before = true;
    for_each_captured([&](CapturedStep& step) { is_as_before &= step.prepare_captured_step(); });
    return is_as_before;
  }
  bool may_be_captured() const override {
    return std::ranges::any_of(members(), [](const auto& member) {
      const auto* const step = dynamic_cast<const CapturedStep*>(member.get());
      return step && step->may_be_captured();
    });
  }
  void note_replayed_step() override {
    for_each_captured([](CapturedStep& step) { step.note_replayed_step(); });
  }

 private:
  void step_with_clip(const StepDivisor& divisor, const at::Tensor& found_inf) override {
    const Divisor clip = deferred_clip_.pending_for_step(*this);
    StepDivisor all = divisor;
    if (!divisor.clip.defined()) all.product = clip.times(divisor.product);
    for_each_step([&](ScaledStep& step) { call_scaled_step(step, all, found_inf); });
    deferred_clip_.forget();
  }

  template <class F>
  void for_each_step(const F& f) const {
    for (const auto& member : members()) f(dynamic_cast<ScaledStep&>(*member));
  }
  template <class F>
  void for_each_captured(const F& f) const {
    for (const auto& member : members()) {
      if (auto* const step = dynamic_cast<CapturedStep*>(member.get())) f(*step);
    }
  }
};

/// An optimizer that steps all of `members`: a set, or the only member.
inline std::shared_ptr<torch::optim::Optimizer> as_one(const OptimizerPointers& members) {
  if (members.size() == 1) return members.front();
  const bool all_scaled = std::ranges::all_of(members, [](const auto& member) {
    return dynamic_cast<const ScaledStep*>(member.get()) != nullptr;
  });
  if (all_scaled) return std::make_shared<ScaledOptimizerSet>(members);
  return std::make_shared<OptimizerSet>(members);
}

/// Calls f with the members of a set, or with an optimizer that is no set.
template <class F>
void for_each_optimizer(const torch::optim::Optimizer& optimizer, const F& f) {
  const auto* const set = dynamic_cast<const OptimizerSet*>(&optimizer);
  if (!set) return f(optimizer);
  for (const auto& member : set->members()) f(*member);
}

}  // namespace TORCHAMP_NAMESPACE::detail
