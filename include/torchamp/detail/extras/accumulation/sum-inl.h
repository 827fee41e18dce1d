// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/detail/core/optim/conditional_add.h"
#include "torchamp/detail/core/optim/state_tensors.h"
#include "torchamp/detail/extras/accumulation/sum.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY void GradientSum::check(const torch::optim::Optimizer& optimizer) const {
  check_parameters(optimizer, "backward");
  const std::vector<at::Tensor> parameters = all_parameters(optimizer);
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    const at::Tensor& gradient = gradient_of(parameters[slot]);
    if (!gradient.defined()) continue;
    TORCH_CHECK_VALUE(gradient.layout() == at::kStrided, "Accumulation::backward: the gradient ",
                      gradient.sizes(), " has the layout ", gradient.layout(),
                      ". With .drop_bad gradients must be dense: leave .drop_bad out.");
    if (!has_sum(slot)) continue;
    const at::Tensor& sum = sums_[slot];
    TORCH_CHECK_VALUE(gradient.sizes() == sum.sizes() && gradient.device() == sum.device() &&
                          gradient.is_complex() == sum.is_complex(),
                      "Accumulation::backward: the gradient ", gradient.scalar_type(), ' ',
                      gradient.sizes(), " on ", gradient.device(), " of parameter ", slot,
                      " cannot be added to the sum of the window, ", sum.scalar_type(), ' ',
                      sum.sizes(), " on ", sum.device(),
                      ". Change parameters between windows, or call discard().");
  }
}

TORCHAMP_BODY void GradientSum::check_parameters(const torch::optim::Optimizer& optimizer,
                                                 const char* call) const {
  std::size_t found = 0, summed = 0;
  const std::vector<at::Tensor> parameters = all_parameters(optimizer);
  for (std::size_t slot = 0; slot < sums_.size(); ++slot) {
    if (!has_sum(slot)) continue;
    ++summed;
    found += slot < parameters.size() &&
             parameters[slot].unsafeGetTensorImpl() == parameters_[slot] &&
             parameters[slot].sizes() == sums_[slot].sizes();
  }
  TORCH_CHECK(found == summed, "Accumulation::", call, ": ", summed - found,
              " parameter(s) of the optimizer were removed, moved or reshaped within the window. "
              "Change them between windows, or call discard().");
}

TORCHAMP_BODY std::function<void()> GradientSum::prepared(const torch::optim::Optimizer& optimizer,
                                                          const at::Tensor& found_inf) {
  const InternalOps guard;
  GradientSum sum = *this;  // the next state
  std::vector<Batch> batches;
  const std::vector<at::Tensor> parameters = all_parameters(optimizer);
  sum.sums_.resize(std::max(sums_.size(), parameters.size()));
  sum.parameters_.resize(sum.sums_.size());
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    const at::Tensor& gradient = gradient_of(parameters[slot]);
    if (!gradient.defined()) continue;
    at::Tensor& of_slot = sum.sums_[slot];
    if (!of_slot.defined()) {
      of_slot = at::zeros_like(gradient, gradient.options().dtype(sum_dtype(gradient)));
      sum.parameters_[slot] = parameters[slot].unsafeGetTensorImpl();
    }
    group_of(batches, TensorKind::of(real(of_slot))).take(of_slot, gradient);
  }
  if (found_inf.defined()) {
    for (Batch& batch : batches) batch.flag = to_device_async(batch.device, found_inf);
    if (!dropped_.defined()) sum.dropped_ = at::zeros({}, found_inf.options());
  }
  ++(found_inf.defined() ? sum.flagged_ : sum.added_);
  return [this, sum = std::move(sum), batches = std::move(batches), found_inf]() mutable {
    if (batches.empty()) return;
    const InternalOps internal;
    *this = std::move(sum);
    for (Batch& batch : batches) {
      add_unless(batch.flag, batch.sums, batch.gradients);
    }
    if (found_inf.defined()) dropped_.add_(found_inf);
  };
}

TORCHAMP_BODY ReadOnce GradientSum::kept() const {
  const InternalOps guard;
  ReadOnce kept;
  if (dropped_.defined()) {
    kept.tensor = dropped_.neg().add_(static_cast<double>(added_ + flagged_));
  } else {
    kept.on_host = static_cast<double>(added_);
  }
  return kept;
}

TORCHAMP_BODY GradientSum::Mean GradientSum::give_mean_to(torch::optim::Optimizer& optimizer,
                                                          const ReadOnce& kept) const {
  check_parameters(optimizer, "flush");
  const InternalOps guard;
  std::vector<Batch> batches;
  for (std::size_t slot = 0; slot < sums_.size(); ++slot) {
    if (!has_sum(slot)) continue;
    const at::Tensor sum = real(sums_[slot]);
    Batch& batch = group_of(batches, TensorKind::of(sum));
    batch.sums.push_back(sum);
    batch.slots.push_back(slot);
  }
  Mean result;
  std::vector<at::Tensor> of_slot(sums_.size());
  for (const Batch& batch : batches) {
    GradientBatch& mean = result.gradients.emplace_back(GradientBatch{{batch.device, batch.dtype}});
    if (kept.on_host) {
      mean.gradients = at::_foreach_div(batch.sums, *kept.on_host);
    } else {
      mean.gradients = at::_foreach_div(
          batch.sums, to_device_async(batch.device, kept.tensor.clamp_min(1.)).to(batch.dtype));
    }
    for (std::size_t i = 0; i < batch.slots.size(); ++i) {
      const at::Tensor& values = mean.gradients[i];
      // A copy: Optimizer::zero_grad takes no views.
      of_slot[batch.slots[i]] =
          sums_[batch.slots[i]].is_complex() ? at::view_as_complex(values).clone() : values;
    }
  }
  if (kept.tensor.defined()) {
    result.found_inf = kept.tensor.eq(0.).to(at::kFloat);
    check_finite(result.gradients, result.found_inf);
  }
  const std::vector<at::Tensor> parameters = all_parameters(optimizer);
  for (std::size_t slot = 0; slot < of_slot.size(); ++slot) {
    if (!of_slot[slot].defined()) continue;
    parameters[slot].mutable_grad() = of_slot[slot].to(step_dtype(parameters[slot]));
  }
  return result;
}

TORCHAMP_BODY void GradientSum::Batch::take(const at::Tensor& sum, const at::Tensor& gradient) {
  at::Tensor added = gradient.to(sum.scalar_type()).resolve_conj().resolve_neg();
  // The kernel processes elements in the order of memory.
  if (added.strides() != sum.strides()) added = at::empty_like(sum).copy_(added);
  sums.push_back(real(sum));
  gradients.push_back(real(added));
}

}  // namespace TORCHAMP_NAMESPACE::detail
