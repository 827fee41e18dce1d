// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/rsub.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/clip_calls.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/multiply.h"
#include "torchamp/detail/core/gradients/norm.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

/// @file
/// @brief Core. clip_grad_norm_ and clip_grad_value_, for unscaled and scaled gradients.
///
/// Clips gradients like torch.nn.utils.clip_grad_norm_ and clip_grad_value_. None of these
/// functions synchronises. Exception: if some gradients are on the host and others on a device, the
/// host waits for the norm. The number of calls of ATen's kernels does not grow with the number of
/// gradients. Parameters without a gradient are ignored; a parameter that is passed twice counts
/// once. If the gradients of two parameters share memory, these functions replace one of them by a
/// clone, and the norm counts both. For shards of ShardedMasterWeights all processes call these
/// functions together, and the norm includes the shards of all processes; a norm_type of 0 is then
/// an error.
///
/// With a GradScaler, gradients are clipped as if they had never been scaled. Either unscale first
/// and then clip,
///
///     scaler.unscale_(optimizer);
///     torchamp::clip_grad_norm_(model->parameters(), 1.);
///
/// or pass the scaler, before or after unscale_:
///
///     torchamp::clip_grad_norm_(scaler, optimizer, 1.);
///
/// If you pass a FusedOptimizer, its next step divides the gradients, and `.grad` is unchanged: if
/// you print `.grad`, you see gradients that are not clipped. Clipping then costs only the pass
/// that computes the norm: see Note [Norms of scaled gradients]. Until that step, do not write to
/// the gradients, and do not replace, add or drop any: the step would throw (see
/// FusedOptimizer::divide_next_step). fp64 gradients are multiplied at once, because such a step
/// divides by an fp32 number.

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// The parameters of each group.
inline std::vector<at::TensorList> parameter_lists(const torch::optim::Optimizer& optimizer) {
  std::vector<at::TensorList> lists;
  for (const auto& group : optimizer.param_groups()) lists.emplace_back(group.params());
  return lists;
}

/// The shards to which the parameters with a gradient belong; null if the parameters are no shards.
/// Throws if only some parameters are shards, or if they belong to different ShardedMasterWeights:
/// then no norm is common to all.
inline const Shards* common_shards(const std::vector<at::TensorList>& lists, const char* call) {
  const Shards* shards = nullptr;
  bool is_first = true;
  for (const at::TensorList list : lists) {
    for (const at::Tensor& tensor : list) {
      if (!tensor.defined() || !gradient_of(tensor).defined()) continue;
      const WeightMeta* const meta = weight_meta_of(tensor);
      const Shards* const own = meta ? meta->shards.get() : nullptr;
      TORCHAMP_CHECK_VALUE(
          std::exchange(is_first, false) || own == shards, call,
          ": some parameters are shards of ShardedMasterWeights, others are not, or "
          "belong to another model. Clip them separately.");
      shards = own;
    }
  }
  return shards;
}

inline void check_limit(const char* limit, double value) {
  TORCHAMP_CHECK_VALUE(value >= 0., limit, " is ", value, ". It must be 0 or more.");
}

/// The factor for the gradients, for a finite max_norm. Like PyTorch's, it is not finite if the
/// norm is not.
inline at::Tensor clip_coefficient(const at::Tensor& norm, double max_norm) {
  return norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.);
}

/// The divisor for the gradients, instead of a factor: max(1, (norm + eps) / max_norm). If fp32 can
/// hold 1 / max_norm, the form eps / max_norm + norm / max_norm saves a launch. The divisor is at
/// least 1, so it makes an inf of no finite gradient.
inline at::Tensor clip_divisor(const at::Tensor& norm, double max_norm) {
  constexpr double eps = 1e-6;
  const double factor = 1. / max_norm;
  const bool holds = factor <= std::numeric_limits<float>::max();
  const at::Tensor excess =
      holds ? at::rsub(norm, eps * factor, /*alpha=*/-factor) : norm.add(eps).div_(max_norm);
  return excess.clamp_min(1.);
}

/// Multiplies all gradients in place by a 0-dim tensor: a few kernels for each device and dtype. If
/// memory runs out, no gradient is changed.
inline void multiply(const std::vector<GradientBatch>& batches, const at::Tensor& factor) {
  std::vector<Multiplication> multiplications;
  multiplications.reserve(batches.size());
  for (const GradientBatch& batch : batches) {
    const at::Tensor here = to_device_async(batch.device, factor);
    if (batch.dtype == at::kFloat || is_16_bit(batch.dtype)) {
      const at::Tensor unused = at::zeros({}, at::TensorOptions(batch.device).dtype(at::kFloat));
      multiplications.emplace_back(batch, here.to(at::kFloat), unused);
    } else {  // the factor may be fp64
      multiplications.emplace_back(batch, here);
    }
  }
  for (Multiplication& multiplication : multiplications) multiplication.run();
}

// Note [One read for norm and check]
// If a gradient is not finite, neither is a norm of a positive order, nor the divisor made from it.
// The same holds if a quotient of a gradient and the scale is not finite, because the norm is the
// norm of these quotients, and at least as large as each of them.
// So if a step of a GradScaler applies the clip, the scaler checks these two numbers instead of the
// gradients. If such a number is not finite on the host, the scaler also checks the gradients: on
// the host a step is taken whenever all gradients are finite. See find_infs in
// detail/core/scaler/step-inl.h.

/// `scale`: the gradients' scale; undefined if it is 1.
inline at::Tensor clip_norm(torch::optim::Optimizer& optimizer, const at::Tensor& scale,
                            double max_norm, double norm_type) {
  const InternalOps internal;
  const std::vector<at::TensorList> params = parameter_lists(optimizer);
  const auto batches = gradients_to_clip(params, "clip_grad_norm_");
  DeferredClip* const deferred = find_deferred_clip(optimizer);
  const Divisor before = deferred ? deferred->pending_for(optimizer) : Divisor();
  const at::Tensor& divisor = before.number;
  const bool is_divided = scale.defined() || divisor.defined();
  at::Tensor norm = is_divided ? total_norm_divided(batches, norm_type, scale, divisor)
                               : total_norm(batches, norm_type);
  const Shards* const shards = common_shards(params, "clip_grad_norm_");
  if (shards) norm = shards->norm_of_all(norm, norm_type);
  if (batches.empty()) return norm;
  // Then nothing is clipped. The divisor is 1 if the norm is finite, and NaN otherwise: a scaler's
  // step reads from it whether the gradients are finite.
  const bool only_measures = std::isinf(max_norm);
  if (deferred && norm.scalar_type() == at::kFloat && (scale.defined() || !only_measures)) {
    const at::Tensor excess = clip_divisor(norm, max_norm);
    // A divisor that fp32 cannot hold would make all gradients 0; the host can check this if the
    // norm is on the host.
    const bool holds = max_norm == 0. || !norm.is_cpu() ||
                       (!only_measures && !std::isfinite(*norm.const_data_ptr<float>())) ||
                       std::isfinite(*excess.const_data_ptr<float>());
    if (holds) {
      const bool may_be_infinite = max_norm == 0.;
      // Not with shards: a maximum over processes may lose NaNs.
      const bool shows_non_finite =
          norm_type > 0. && !shards && !may_be_infinite && scale.defined();
      const bool names_no_scaler = !scale.defined() && !only_measures;
      deferred->add(optimizer, {excess, may_be_infinite, shows_non_finite, norm, names_no_scaler});
      return norm;
    }
  }
  if (!only_measures) multiply(batches, clip_coefficient(norm, max_norm));
  // The factor was at most 1: finite gradients stay finite, so `before` still shows whether all
  // gradients are finite.
  if (before.defined()) keep_deferred(*deferred, optimizer, before);
  return norm;
}

inline void clip_value(const std::vector<GradientBatch>& batches, double value) {
  for (const GradientBatch& batch : batches) {
    at::_foreach_clamp_min_(batch.gradients, -value);
    at::_foreach_clamp_max_(batch.gradients, value);
  }
}

inline void check_before_step(const char* call, const GradScaler& scaler,
                              const torch::optim::Optimizer& optimizer) {
  if (const OptimizerState* const state = ScalerParts::ledger(scaler).optimizers.find(optimizer)) {
    check_allowed(*state, Call::clip, call);
  }
}

}  // namespace detail

/// Multiplies the gradients of `params` (a vector, a list in braces, or one tensor) in place by
/// min(1, max_norm / (norm + 1e-6)). `norm` is the `norm_type`-norm of all gradients as one vector.
/// `norm_type` is any number or infinity. With 0., the norm is instead the number of gradients that
/// have a non-zero element, like in PyTorch.
///
/// Returns the norm before clipping: a 0-dim tensor on the first gradient's device, in fp64 if a
/// gradient is fp64, otherwise in fp32; 0 without gradients. If the norm is inf or NaN, the
/// gradients become inf, NaN or 0, like in PyTorch. An infinite max_norm measures and never changes
/// a gradient. Errors: a max_norm that is negative or NaN; gradients that are neither strided nor
/// sparse COO; expanded gradients.
inline at::Tensor clip_grad_norm_(at::TensorList params, double max_norm, double norm_type = 2.) {
  detail::check_limit("clip_grad_norm_: max_norm", max_norm);
  const detail::InternalOps internal;
  const auto batches = detail::gradients_to_clip({params}, "clip_grad_norm_");
  at::Tensor norm = detail::total_norm(batches, norm_type);
  const auto* const shards = detail::common_shards({params}, "clip_grad_norm_");
  if (shards) norm = shards->norm_of_all(norm, norm_type);
  if (!std::isfinite(max_norm)) return norm;
  if (!batches.empty()) detail::multiply(batches, detail::clip_coefficient(norm, max_norm));
  detail::ClipCalls::note(params);
  return norm;
}

/// Clips the unscaled gradients of all parameters of `optimizer` to a norm of at most `max_norm`;
/// returns the norm before clipping. See clip_grad_norm_(params, max_norm). A FusedOptimizer's
/// gradients stay unchanged; its next step clips.
inline at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                  double norm_type = 2.) {
  detail::check_limit("clip_grad_norm_: max_norm", max_norm);
  at::Tensor norm = detail::clip_norm(optimizer, at::Tensor(), max_norm, norm_type);
  if (std::isfinite(max_norm)) detail::ClipCalls::note(optimizer);
  return norm;
}

/// Clips gradients that `scaler` has scaled, as if they had never been scaled. Call it between
/// backward() and scaler.step(optimizer); between step() and update() it is an error. It unscales
/// the gradients first (GradScaler::unscale_). A FusedOptimizer's step does both instead: it
/// divides by the scale and clips. Returns the norm of the unscaled gradients. The norm does not
/// depend on the scale, because sums of squares do not overflow. Exception: a scaled gradient that
/// is an inf.
inline at::Tensor clip_grad_norm_(GradScaler& scaler, torch::optim::Optimizer& optimizer,
                                  double max_norm, double norm_type = 2.) {
  detail::check_limit("clip_grad_norm_: max_norm", max_norm);
  detail::check_before_step("clip_grad_norm_", scaler, optimizer);
  at::Tensor scale;
  if (scaler.is_enabled() && !scaler.is_unscaled(optimizer)) {
    if (detail::find_deferred_clip(optimizer)) {
      scale = detail::ScalerParts::scale(scaler).scale();
      TORCHAMP_CHECK(scale.defined(),
                     "clip_grad_norm_: nothing has been scaled yet. Call scale(loss).backward() "
                     "first.");
    } else {
      scaler.unscale_(optimizer);
    }
  }
  at::Tensor norm = detail::clip_norm(optimizer, scale, max_norm, norm_type);
  if (std::isfinite(max_norm)) detail::ClipCalls::note(optimizer);
  return norm;
}

/// Clamps the elements of the gradients of `params` in place to [-value, value]. Errors: a negative
/// value; otherwise as clip_grad_norm_.
inline void clip_grad_value_(at::TensorList params, double value) {
  detail::check_limit("clip_grad_value_: the value", value);
  const detail::InternalOps internal;
  detail::clip_value(detail::gradients_to_clip({params}, "clip_grad_value_"), value);
  detail::ClipCalls::note(params);
}

/// Clamps the unscaled gradients of all parameters of `optimizer` to [-value, value]. If the next
/// step would apply an earlier clip_grad_norm_, this function first applies that clip to the
/// gradients.
inline void clip_grad_value_(torch::optim::Optimizer& optimizer, double value) {
  detail::check_limit("clip_grad_value_: the value", value);
  const detail::InternalOps internal;
  const auto batches =
      detail::gradients_to_clip(detail::parameter_lists(optimizer), "clip_grad_value_");
  if (detail::DeferredClip* const deferred = detail::find_deferred_clip(optimizer)) {
    const at::Tensor divisor = deferred->pending_for(optimizer).number;
    if (divisor.defined()) detail::multiply(batches, divisor.reciprocal());
    deferred->forget();
  }
  detail::clip_value(batches, value);
  detail::ClipCalls::note(optimizer);
}

/// Clamps gradients that `scaler` has scaled. Call it between backward() and
/// scaler.step(optimizer); between step() and update() it is an error. It unscales the gradients
/// first (GradScaler::unscale_), unless they are unscaled already.
inline void clip_grad_value_(GradScaler& scaler, torch::optim::Optimizer& optimizer, double value) {
  detail::check_limit("clip_grad_value_: the value", value);
  detail::check_before_step("clip_grad_value_", scaler, optimizer);
  if (scaler.is_enabled() && !scaler.is_unscaled(optimizer)) scaler.unscale_(optimizer);
  clip_grad_value_(optimizer, value);
}

}  // namespace TORCHAMP_NAMESPACE
