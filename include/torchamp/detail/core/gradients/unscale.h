// SPDX-License-Identifier: BSD-3-Clause
// Finds infs and NaNs in gradients, by device and dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [The kernel that unscales]
// ATen's _amp_foreach_non_finite_check_and_unscale_ multiplies all gradients of a dtype by an fp32
// factor and detects infs and NaNs, in one pass. But not every device has it, CUDA's kernel takes
// no bf16 (pytorch issue 127176), and MPS's kernel zeroed 16-bit gradients: see
// Note [MPS's kernels]. _foreach_mul_ is no replacement: it would round the factor to 16 bits and
// launch a kernel for each gradient. So in these cases 16-bit gradients go through fp32 copies.
//
// If nothing must be multiplied, a GPU should only read, because memory limits its speed: there the
// kernel checks the gradients' largest values. A CPU computes norms faster. If the norm of a large
// gradient is finite, so is the gradient; the kernel checks all other gradients.
//
// CUDA's kernel checks fp64 gradients as fp32, so a gradient beyond fp32's range counts as an inf,
// as in Python. torchamp's own further checks (quotients by a scale below 1, a recheck) are made in
// fp64.

/// Whether ATen's kernel that unscales exists and is correct for such gradients.
inline bool unscale_kernel_takes(const GradientBatch& batch) {
  static const c10::OperatorHandle kernel = c10::Dispatcher::singleton().findSchemaOrThrow(
      "aten::_amp_foreach_non_finite_check_and_unscale_", "");
  if (batch.gradients.empty()) return true;
  const c10::DispatchKeySet keys = batch.gradients[0].key_set();
  if (!kernel.hasKernelForDispatchKey(c10::highestPriorityBackendTypeId(keys))) return false;
  if (batch.dtype == at::kFloat || batch.dtype == at::kDouble) return true;
  const DeviceFacts facts = facts_of(batch.device.type());
  return (batch.dtype == at::kHalf && facts.unscales_fp16) ||
         (batch.dtype == at::kBFloat16 && facts.unscales_bf16);
}

/// Whether the kernel would check such numbers as fp32.
inline bool kernel_narrows(const TensorKind& numbers) {
  return numbers.dtype == at::kDouble && !numbers.device.is_cpu();
}

/// A 1 on the host, for the kernel there.
inline const at::Tensor& one_on_host() {
  static const auto& one = *new at::Tensor([] {  // never destroyed
    const c10::InferenceMode no_inference(false);
    return at::ones({}, at::kFloat);
  }());
  return one;
}

// ---- A few numbers, in one launch ---------------------------------------------------------------

/// Sets `flag`, 0-dim fp32 on their device, to 1 if any of these numbers, 0-dim, is not finite.
inline void check_by_ops(const GradientBatch& numbers, at::Tensor& flag) {
  const at::Tensor finite = at::stack(numbers.gradients).isfinite().all();
  at::maximum_out(flag, flag, finite.logical_not().to(flag.scalar_type()));
}

/// The same by ATen's kernel, if that is correct. The numbers keep their values: the kernel
/// multiplies them by `one`, 0-dim fp32 on their device, which holds a 1.
inline void check_numbers(const GradientBatch& numbers, const at::Tensor& one, at::Tensor& flag) {
  if (numbers.gradients.empty()) return;
  if (!unscale_kernel_takes(numbers)) return check_by_ops(numbers, flag);
  at::_amp_foreach_non_finite_check_and_unscale_(numbers.gradients, flag, one);
}

/// The same for temporary numbers. The kernel checks each number before it multiplies it, so the
/// flag is correct for every factor. The factor is the flag itself, which saves a tensor with a 1;
/// the kernel may change it meanwhile.
inline void check_temporaries(const GradientBatch& numbers, at::Tensor& flag) {
  check_numbers(numbers, /*one=*/flag, flag);
}

/// The same, but fp64 is checked as such on every device.
inline void check_temporaries_exactly(const GradientBatch& numbers, at::Tensor& flag) {
  if (numbers.gradients.empty()) return;
  kernel_narrows(numbers) ? check_by_ops(numbers, flag) : check_temporaries(numbers, flag);
}

// ---- Checks that leave gradients, and their versions, as they are -------------------------------

/// The largest magnitude of each gradient that is not empty, with at least the precision of fp32;
/// NaN if the gradient has one.
inline GradientBatch amaxes_of(const GradientBatch& batch) {
  // If one tensor has gaps in memory, ATen processes its whole list one by one.
  std::vector<at::Tensor> dense, gapped;
  for (const at::Tensor& gradient : batch.gradients) {
    if (gradient.numel() == 0) continue;
    (gradient.is_non_overlapping_and_dense() ? dense : gapped).push_back(gradient);
  }
  const at::ScalarType dtype = is_16_bit(batch.dtype) ? at::kFloat : batch.dtype;
  GradientBatch amaxes{{batch.device, dtype}};
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const std::vector<at::Tensor>* list : {&dense, &gapped}) {
    if (list->empty()) continue;
    for (at::Tensor& amax : at::_foreach_norm(*list, infinity, dtype)) {
      amaxes.gradients.push_back(std::move(amax));
    }
  }
  return amaxes;
}

/// Sets `flag` to 1 if any of these gradients, on the host, is not finite. Large ones are checked
/// by their norms first, which only read.
inline void check_on_host(const GradientBatch& batch, at::Tensor& flag) {
  const auto reads_fast = [](const at::Tensor& gradient) {
    constexpr int64_t large = 1 << 15;  // from this size on a norm costs less than the kernel
    return gradient.numel() >= large && gradient.is_non_overlapping_and_dense();
  };
  const bool is_wide = batch.dtype == at::kFloat || batch.dtype == at::kDouble;
  if (!is_wide || std::none_of(batch.gradients.begin(), batch.gradients.end(), reads_fast)) {
    return check_numbers(batch, one_on_host(), flag);
  }
  std::vector<at::Tensor> normed;
  GradientBatch others{{batch.device, batch.dtype}};
  for (const at::Tensor& gradient : batch.gradients) {
    (reads_fast(gradient) ? normed : others.gradients).push_back(gradient);
  }
  const std::vector<at::Tensor> norms = at::_foreach_norm(normed, 2.);
  for (std::size_t i = 0; i < norms.size(); ++i) {
    const bool is_finite = batch.dtype == at::kFloat
                               ? std::isfinite(*norms[i].const_data_ptr<float>())
                               : std::isfinite(*norms[i].const_data_ptr<double>());
    if (!is_finite) others.gradients.push_back(normed[i]);
  }
  check_numbers(others, one_on_host(), flag);
}

/// Sets `flag`, 0-dim fp32 on their device, to 1 if any gradient is not finite.
inline void check_batch(const GradientBatch& batch, at::Tensor& flag) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  if (batch.device.is_cpu() && unscale_kernel_takes(batch)) return check_on_host(batch, flag);
  check_temporaries(amaxes_of(batch), flag);
}

/// Sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any gradient is not finite. Reads each gradient
/// once; for reads of devices see DeviceFlags.
inline void check_finite(const std::vector<GradientBatch>& batches, at::Tensor& found_inf) {
  DeviceFlags flags(found_inf);
  for (const GradientBatch& batch : batches) check_batch(batch, flags.on(batch.device));
  flags.gather();
}

/// The same for gradients that the kernel has unscaled: fp64 counts as it is.
inline void check_unscaled(const std::vector<GradientBatch>& batches, at::Tensor& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  DeviceFlags flags(found_inf);
  for (const GradientBatch& batch : batches) {
    at::Tensor& flag = flags.on(batch.device);
    batch.device.is_cpu() ? check_batch(batch, flag)
                          : check_temporaries_exactly(amaxes_of(batch), flag);
  }
  flags.gather();
}

/// The largest magnitudes divided by `scale`. If the kernel narrows fp64, it sets `flag` for
/// magnitudes that fp32 cannot represent: check the quotients themselves.
inline GradientBatch divided_amaxes_of(const GradientBatch& batch, const at::Tensor& scale,
                                       at::Tensor& flag) {
  GradientBatch amaxes = amaxes_of(batch);
  if (amaxes.gradients.empty()) return amaxes;
  const at::Tensor here = to_device_async(amaxes.device, scale);
  if (!kernel_narrows(amaxes)) {
    at::_foreach_div_(amaxes.gradients, here);
    return amaxes;
  }
  GradientBatch quotients{{amaxes.device, amaxes.dtype}, at::_foreach_div(amaxes.gradients, here)};
  check_temporaries(amaxes, flag);
  return quotients;
}

/// The division by the coming fused step, as far as it must be checked before.
struct ComingDivision {
  at::Tensor scale{};   ///< gradients whose quotient by this is not finite count; or undefined
  at::Tensor number{};  ///< counts if not finite; on the flag's device, not the host; or undefined
  at::Tensor one{};     ///< a 1 there, wanted with `number`
};

/// check_finite() for gradients that are about to be divided. A launch that checks gradients also
/// checks the number, if one is of its device and dtype.
inline void check_before_division(const std::vector<GradientBatch>& batches,
                                  const ComingDivision& division, at::Tensor& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  const TensorKind kind_of_number{found_inf.device(), at::kFloat};
  DeviceFlags flags(found_inf);
  at::Tensor number = division.number;  // until it is checked
  const bool divides = division.scale.defined();
  for (const GradientBatch& batch : batches) {
    at::Tensor& flag = flags.on(batch.device);
    if (batch.device.is_cpu() && !divides) {
      check_batch(batch, flag);
      continue;
    }
    GradientBatch amaxes =
        divides ? divided_amaxes_of(batch, division.scale, flag) : amaxes_of(batch);
    const bool takes_number = !amaxes.gradients.empty() && amaxes == kind_of_number;
    if (number.defined() && takes_number) {
      amaxes.gradients.push_back(std::exchange(number, {}));
      check_numbers(amaxes, division.one, flag);
    } else if (divides) {
      check_temporaries_exactly(amaxes, flag);
    } else {
      check_temporaries(amaxes, flag);
    }
  }
  if (number.defined()) check_numbers({kind_of_number, {number}}, division.one, found_inf);
  flags.gather();
}

}  // namespace TORCHAMP_NAMESPACE::detail
