// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/any.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/core/check_order/order_check.h"
#include "torchamp/detail/core/check_order/steps_beside-inl.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// ---- The table of mistakes ----------------------------------------------------------------------

struct OrderCheck::Row {
  When when;
  bool (OrderCheck::*is_made)(const Moment&) const;
  const char* sentence;
};

inline const OrderCheck::Row OrderCheck::rows[] = {
    {When::divides, &OrderCheck::scales_nothing,
     "nothing was scaled since the last update(), so these gradients do not have the scale. "
     "Call scaler.scale(loss).backward() in each iteration, and update() once, after the last "
     "step."},
    {When::divides, &OrderCheck::runs_no_backward,
     "no backward() of what scale() returned was called, so these "
     "gradients do not have the scale. Call scaler.scale(loss).backward() in each iteration."},
    {When::divides, &OrderCheck::clips_scaled,
     "these gradients were clipped while scaled, so the scaled norm was limited. Call "
     "clip_grad_norm_(scaler, optimizer, max_norm), or unscale_ before the clip."},
    {When::steps, &OrderCheck::clips_nothing,
     "a clip in this iteration found no gradients of this optimizer, and none followed after "
     "backward(), so nothing was clipped. Clip after the last backward()."},
    {When::steps, &OrderCheck::keeps_gradients,
     "the gradients of the last skipped step were not cleared: backward() has added to their infs "
     "and NaNs. Call zero_grad() in each iteration, also if the step was skipped."},
    {When::updates, &OrderCheck::has_clipped_scaled,
     "gradients were clipped while scaled, so the scaled norm was limited. Call "
     "clip_grad_norm_(scaler, optimizer, max_norm), or unscale_ before the clip."},
    {When::updates, &OrderCheck::has_stepped_with_infs,
     "optimizer.step() after unscale_, or after a clip that names the scaler, has stepped with "
     "infs or NaNs, and weights are inf or NaN now. Call scaler.step(optimizer), which skips such "
     "a step, or step only if found_inf(optimizer) is 0."},
    {When::updates, &OrderCheck::steps_beside,
     "weights that no scaler.step() of this iteration steps were changed while their gradients "
     "were scaled. optimizer.step() steps with gradients that are too large by the scale: call "
     "scaler.step(optimizer) for each optimizer, before update()."},
    {When::updates, &OrderCheck::is_all_fp64,
     "every weight that the scaled losses are computed from is fp64, which a region never casts, "
     "so all products were computed in fp64. Make the model fp32."},
};

TORCHAMP_BODY auto OrderCheck::made_at(When when, const Moment& moment) -> Sentences {
  Sentences made;
  for (std::size_t i = 0; i < std::size(rows); ++i) {
    const std::uint64_t bit = std::uint64_t{1} << i;
    if (rows[i].when != when || (warned_ & bit) != 0 || !(this->*rows[i].is_made)(moment)) continue;
    warned_ |= bit;
    made.push_back(rows[i].sentence);
  }
  return made;
}

// ---- Backward without scale() -------------------------------------------------------------------

/// Gradients of 0, as for a skipped batch, are correct at any scale. Reads only host memory,
/// because a step waits for no device.
inline bool may_be_not_zero(const at::Tensor& gradient) {
  const InternalOps guard;
  const bool is_read = gradient.is_cpu() && gradient.layout() == at::kStrided;
  return !is_read || gradient.any().item<bool>();
}

/// An iteration has gradients but no scale(), and an earlier one had.
inline bool OrderCheck::scales_nothing(const Moment& moment) const {
  return !moment.knows_scale && !moment.is_fixed && !scaled_ && had_scale_ &&
         any_gradient(*moment.optimizer, may_be_not_zero);
}

/// The iteration has scaled only losses, that is, scalars with a graph, and no backward of one has
/// run. (Another scaled tensor may be a gradient, which a backward takes.)
inline bool OrderCheck::runs_no_backward(const Moment& moment) const {
  return !moment.knows_scale && !moment.is_fixed && scaled_ && !ran_backward_ &&
         !scaled_gradient_ && any_gradient(*moment.optimizer, may_be_not_zero);
}

// ---- Clips --------------------------------------------------------------------------------------

/// Detects it by the gradients' norms, see Note [What a clip leaves], or by a deferred clip.
inline bool OrderCheck::clips_scaled(const Moment& moment) const {
  if (moment.knows_scale || moment.is_fixed || scale_is_known_ || !scaled_) return false;
  const DeferredClip* const deferred = find_deferred_clip(*moment.optimizer);
  return (deferred && deferred->has_named_no_scaler(*moment.optimizer)) ||
         (norms_ && norms_->show_clip());
}

inline bool OrderCheck::has_clipped_scaled(const Moment& /*moment*/) const {
  return std::any_of(compared_.begin(), compared_.end(),
                     [](const GradientNorms& norms) { return norms.show_clip(); });
}

inline bool OrderCheck::clips_nothing(const Moment& moment) const {
  return any_gradient(*moment.optimizer) && ClipCalls::was_in_vain(began_, *moment.optimizer);
}

// ---- Gradients of a skipped step ----------------------------------------------------------------

inline void OrderCheck::look_for_kept_gradients() {
  for (const Handled& one : last_handled_) {
    if (!one.skipped) continue;
    for (std::size_t i = 0; i < one.gradients.size(); ++i) {
      const at::Tensor now = gradient_of(one.parameters[i].lock());
      if (now.defined() && one.gradients[i].is_same(now)) kept_.emplace_back(now);
    }
  }
}

inline bool OrderCheck::keeps_gradients(const Moment& moment) const {
  return any_gradient(*moment.optimizer, [this](const at::Tensor& gradient) {
    return std::any_of(kept_.begin(), kept_.end(),
                       [&](const WeakTensor& one) { return one.is(gradient); });
  });
}

// ---- Steps of unscaled gradients that the scaler has not taken ----------------------------------

// optimizer.step() after unscale_ steps with gradients that are unscaled, so it is right as long as
// they are finite; and a program may look whether they are, by found_inf() or by their norm, before
// it steps. So only harm that is done counts: unscale_ has found an inf or NaN, weights were
// written to after it, the scaler has not stepped them, and now one of them is not finite. What a
// device has found arrives some iterations later. Weights are read only if such an inf was found.

TORCHAMP_BODY void OrderCheck::collect_unchecked_steps() {
  at::Tensor found_inf;
  std::vector<WeakTensor> written;
  for (const Handled& one : handled_) {
    if (!one.found_inf.defined()) continue;
    const std::size_t before = written.size();
    for (const TensorSnapshot& parameter : one.parameters) {
      const at::Tensor now = parameter.lock();
      if (now.defined() && !parameter.is_same(now)) written.emplace_back(now);
    }
    if (written.size() == before) continue;
    const InternalOps guard;
    found_inf = found_inf.defined() ? at::maximum(found_inf, one.found_inf) : one.found_inf;
  }
  if (!found_inf.defined()) return;
  unchecked_inf_.send(found_inf, /*meanwhile=*/0.F);
  unchecked_weights_ = std::move(written);
}

inline bool OrderCheck::has_stepped_with_infs(const Moment& /*moment*/) const {
  if (unchecked_weights_.empty() || unchecked_inf_.empty() || unchecked_inf_[0] == 0) return false;
  return std::any_of(unchecked_weights_.begin(), unchecked_weights_.end(),
                     [](const WeakTensor& one) {
                       const InternalOps guard;
                       const at::Tensor weight = one.lock();
                       return weight.defined() && !at::isfinite(weight).all().item<bool>();
                     });
}

inline bool OrderCheck::is_all_fp64(const Moment& /*moment*/) const {
  return any_matrix_ && all_fp64_;
}

// ---- The events ---------------------------------------------------------------------------------

TORCHAMP_BODY void OrderCheck::note_scaled(const at::Tensor& scaled) {
  scaled_ = true;
  if (!scaled.requires_grad() || scaled.numel() != 1) scaled_gradient_ = true;
  if (scaled.requires_grad()) add_leaves(scaled);
}

TORCHAMP_BODY void OrderCheck::note_loss_without_hook() {
  scaled_ = true;
  if (!std::exchange(ran_backward_, true)) look_for_kept_gradients();
}

TORCHAMP_BODY void OrderCheck::note_backward_begins() {
  if (!std::exchange(ran_backward_, true)) look_for_kept_gradients();
  const auto weights = [this](const auto& f) {
    return std::any_of(leaves_.begin(), leaves_.end(),
                       [&](const WeakTensor& leaf) { return f(leaf.lock()); });
  };
  weights_at_begin_ = Snapshot(weights);
  gradients_at_begin_ = Snapshot([&](const auto& f) {
    return weights([&](const at::Tensor& weight) { return f(gradient_of(weight)); });
  });
  for (const WeakTensor& leaf : leaves_) {
    const auto known = trained_.find(leaf.address());
    const at::Tensor weight = leaf.lock();
    if (known == trained_.end() || !weight.defined()) continue;
    Trained& one = known->second;
    one.was_cleared = one.was_cleared || !one.gradient.is_same(gradient_of(weight));
  }
}

TORCHAMP_BODY void OrderCheck::note_backward_ends() {
  if (leaves_.empty()) return;  // the iteration has ended before
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < weights_at_begin_.size(); ++i) {
    const at::Tensor weight = weights_at_begin_[i].lock();
    const at::Tensor gradient = weight.defined() ? gradient_of(weight) : at::Tensor();
    if (!gradient.defined()) continue;
    gradients.push_back(gradient);
    const bool is_wide = weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kDouble;
    if (!is_wide || weight_meta_of(weight)) continue;
    Trained& one = trained_[weights_at_begin_[i].address()];
    if (!one.weight.was_defined()) one = {weights_at_begin_[i], gradients_at_begin_[i]};
    const bool is_of_earlier_backward = one.in_this_iteration && one.gradient.is_same(gradient);
    if (!is_of_earlier_backward && gradients_at_begin_[i].is_same(gradient)) continue;
    one.weight = TensorSnapshot(weight);
    one.gradient = TensorSnapshot(gradient);
    one.in_this_iteration = true;
  }
  norms_.emplace(gradients);
}

TORCHAMP_BODY auto OrderCheck::divides(const Moment& moment) -> Sentences {
  const bool may_clip = moment.knows_scale || moment.is_fixed || scale_is_known_;
  if (norms_ && !may_clip) {
    std::unordered_set<const c10::TensorImpl*> own;
    any_gradient(*moment.optimizer, [&own](const at::Tensor& gradient) {
      own.insert(gradient.unsafeGetTensorImpl());
      return false;
    });
    const auto is_own = [&](const at::Tensor& one) {
      return own.contains(one.unsafeGetTensorImpl());
    };
    norms_->compare(is_own, /*all=*/handled_.empty());
    if (!norms_->is_here()) compared_.push_back(*norms_);
  }
  return made_at(When::divides, moment);
}

TORCHAMP_BODY auto OrderCheck::steps(const Moment& moment) -> Sentences {
  return made_at(When::steps, moment);
}

TORCHAMP_BODY auto OrderCheck::handled(const torch::optim::Optimizer& optimizer) -> Handled& {
  SteppedWeights::note(optimizer);
  forget(optimizer);
  Handled& one = handled_.emplace_back(Handled{OptimizerIdentity(optimizer)});
  one.parameters = Snapshot(walk_parameters(optimizer));
  one.gradients = Snapshot(walk_gradients(optimizer));
  return one;
}

TORCHAMP_BODY void OrderCheck::note_unscaled(const torch::optim::Optimizer& optimizer,
                                             const at::Tensor& found_inf) {
  handled(optimizer).found_inf = found_inf;
}

TORCHAMP_BODY void OrderCheck::note_stepped(const torch::optim::Optimizer& optimizer,
                                            bool skipped) {
  handled(optimizer).skipped = skipped;
}

TORCHAMP_BODY void OrderCheck::forget(const torch::optim::Optimizer& optimizer) {
  std::erase_if(handled_, [&](const Handled& one) { return one.optimizer.is(optimizer); });
}

TORCHAMP_BODY auto OrderCheck::updates(const Moment& moment) -> Sentences {
  // A device may have sent what an earlier iteration has found.
  Sentences made = made_at(When::updates, moment);
  collect_unchecked_steps();
  for (const char* sentence : made_at(When::updates, moment)) made.push_back(sentence);
  for (auto& [address, one] : trained_) {
    one.in_earlier_iteration |= std::exchange(one.in_this_iteration, false);
  }
  had_scale_ |= std::exchange(scaled_, false);
  scale_is_known_ = ran_backward_ = scaled_gradient_ = any_matrix_ = false;
  all_fp64_ = true;
  leaves_.clear();
  reached_.clear();
  weights_at_begin_.clear();
  gradients_at_begin_.clear();
  kept_.clear();
  norms_.reset();
  last_handled_ = std::exchange(handled_, {});
  began_ = ClipCalls::now();
  // A skipped iteration shows little: its gradients are not finite. A high scale skips the first
  // few.
  const bool skipped = std::any_of(last_handled_.begin(), last_handled_.end(),
                                   [](const Handled& one) { return one.skipped; });
  if (!skipped) --iterations_left_;
  return made;
}

}  // namespace TORCHAMP_NAMESPACE::detail
