// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cmath>

#include "torchamp/detail/gradients/collect.h"
#include "torchamp/detail/gradients/deferred_clip.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

// Note [A large scale and a clip]
//
// A fused step divides by one fp32 number, the scale times what a clip has left to it, which is the
// norm of the scaled gradients over max_norm: more than fp32 holds where the scale is so large that
// the gradients come near to that themselves. So where the scale may be above 2^32, gradients to be
// clipped are divided by the scale in the pass that checks them, which costs nothing more, and the
// step divides by the rest. (fp16 gradients, which that would ruin, are too small for it to
// matter.) Whether it may be is known without a read: the host knows what the scale was once and
// how often it may have grown since.
//
// At a lower scale that takes gradients whose norm is above 2^96 max_norm. On the host the product
// is looked at, and such gradients are divided as above, or the step skipped where some are fp16.
// On a device, where looking would be a read, the check of the gradients looks at the product, too:
// if fp32 cannot hold it, the step is skipped and the scale lowered, until it can.

namespace detail {

/// Whether the product of two finite fp32 numbers on the host is more than fp32 holds.
inline bool product_overflows(const at::Tensor& a, const at::Tensor& b) {
  const float one = *a.const_data_ptr<float>(), other = *b.const_data_ptr<float>();
  return std::isfinite(one) && std::isfinite(other) && !std::isfinite(one * other);
}

}  // namespace detail

/// Whether the scale times `divisor`, a clip that is left to the step of `optimizer`, may be more
/// than fp32 holds; see Note [A large scale and a clip].
TORCHAMP_BODY bool GradScaler::clip_may_overflow(torch::optim::Optimizer& optimizer,
                                                 const detail::Divisor& divisor) {
  if (!divisor.defined()) return false;
  constexpr double largest_safe_scale = 0x1p32;
  const bool may = state_.may_exceed(largest_safe_scale, options_) ||
                   (divisor.number.is_cpu() && state_.scale().is_cpu() &&
                    detail::product_overflows(state_.scale(), divisor.value()));
  return may && !detail::has_half_gradients(optimizer);
}

/// On the host, sets `found_inf` where the scale times `divisor`, a clip that is left to a step, is
/// more than fp32 holds.
TORCHAMP_BODY void GradScaler::check_clip(const detail::Divisor& divisor, at::Tensor& found_inf) {
  if (!divisor.defined() || !divisor.number.is_cpu() || !state_.scale().is_cpu()) return;
  if (detail::product_overflows(state_.scale(), divisor.value())) found_inf.fill_(1.);
}

}  // namespace TORCHAMP_NAMESPACE
