// SPDX-License-Identifier: BSD-3-Clause
// Checks gradients for infs and NaNs, by device and dtype, and makes one flag of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>
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

namespace torchamp::detail {

// Note [The kernel that unscales]
// ATen's _amp_foreach_non_finite_check_and_unscale_ multiplies all gradients of a dtype by an fp32
// factor and finds what is not finite, in one pass. Not every device has it, CUDA's takes no bf16
// (pytorch issue 127176), and MPS's zeroed 16-bit gradients: see Note [MPS's kernels]. There,
// _foreach_mul_ would round the factor to 16 bits, too, and launch a kernel for each gradient. So
// 16-bit gradients that the kernel is not right for go through fp32 copies.
//
// Where nothing is to be multiplied, a GPU, which waits for memory, should only read: the kernel
// looks at the gradients' largest values. A CPU finds norms faster: where a large gradient's is
// finite, so is the gradient, and the kernel looks at all others.
//
// CUDA's kernel checks fp64 gradients as fp32, so one beyond fp32's range counts as an inf there,
// as in Python. What torchamp looks at once more (quotients by a scale below 1, a recheck) counts
// as it is in fp64.

/// Whether ATen's kernel that unscales is there and right for such gradients.
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

/// The largest magnitude of each gradient that is not empty, with at least the precision of fp32;
/// NaN where it has one.
inline GradientBatch amaxes_of(const GradientBatch& batch) {
  // One that has gaps in memory would have ATen take all of its list one by one.
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

/// Sets `flag`, 0-dim fp32 on their device, to 1 if any of these numbers, 0-dim, is not finite.
inline void check_numbers_by_ops(const GradientBatch& numbers, at::Tensor& flag) {
  const at::Tensor finite = at::stack(numbers.gradients).isfinite().all();
  at::maximum_out(flag, flag, finite.logical_not().to(flag.scalar_type()));
}

/// Sets `flag`, 0-dim fp32 on their device, to 1 if any of these numbers is not finite.
/// The kernel multiplies the numbers by `one`, 0-dim fp32. Where they are not used again, `one` may
/// hold any number, so callers pass the flag, which saves them a tensor.
inline void check_numbers(const GradientBatch& numbers, const at::Tensor& one, at::Tensor& flag) {
  if (numbers.gradients.empty()) return;
  if (unscale_kernel_takes(numbers)) {
    at::_amp_foreach_non_finite_check_and_unscale_(numbers.gradients, flag, one);
  } else {
    check_numbers_by_ops(numbers, flag);
  }
}

/// The same, but fp64 is checked as such on every device.
inline void check_numbers_exactly(const GradientBatch& numbers, const at::Tensor& one,
                                  at::Tensor& flag) {
  const bool is_narrowed = numbers.dtype == at::kDouble && !numbers.device.is_cpu();
  if (is_narrowed && !numbers.gradients.empty()) {
    check_numbers_by_ops(numbers, flag);
  } else {
    check_numbers(numbers, one, flag);
  }
}

/// The same for gradients on the host. Large ones are checked by their norms first, which only
/// read.
inline void check_on_host(const GradientBatch& batch, const at::Tensor& one, at::Tensor& flag) {
  const auto reads_fast = [](const at::Tensor& gradient) {
    constexpr int64_t large = 1 << 15;  // where a norm costs less than the kernel
    return gradient.numel() >= large && gradient.is_non_overlapping_and_dense();
  };
  const bool is_wide = batch.dtype == at::kFloat || batch.dtype == at::kDouble;
  if (!is_wide || std::none_of(batch.gradients.begin(), batch.gradients.end(), reads_fast)) {
    return check_numbers(batch, one, flag);
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
  check_numbers(others, one, flag);
}

/// Sets `flag` to 1 if any of the gradients is not finite. They are not changed, nor are their
/// versions. `one`: 0-dim fp32 on their device, if there is one.
inline void check_finite(const GradientBatch& batch, at::Tensor& flag, const at::Tensor& one = {}) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  if (batch.device.is_cpu() && unscale_kernel_takes(batch)) {
    return check_on_host(batch, one.defined() ? one : at::full({}, 1., flag.options()), flag);
  }
  check_numbers(amaxes_of(batch), /*one=*/flag, flag);
}

/// Flags of several devices that become one.
class DeviceFlags {
 public:
  explicit DeviceFlags(const at::Tensor& home) { flags_.push_back(home); }

  at::Tensor& on(at::Device device) {
    for (at::Tensor& flag : flags_) {
      if (flag.device() == device) return flag;
    }
    return flags_.emplace_back(at::zeros({}, flags_[0].options().device(device)));
  }

  /// Sets the first to 1 if any is. Reads no device, but waits for the others' flags where the
  /// first lies on the host.
  void gather() {
    for (std::size_t i = 1; i < flags_.size(); ++i) {
      flags_[0].add_(to_device_async(flags_[0].device(), flags_[i])).clamp_max_(1.);
    }
  }

 private:
  std::vector<at::Tensor> flags_;
};

/// Divides these numbers by `scale`. Where fp64 numbers are to be checked exactly afterwards, the
/// kernel checks them first as they are.
inline void divide_and_check(GradientBatch& numbers, const at::Tensor& scale, at::Tensor& flag) {
  const at::Tensor here = to_device_async(numbers.device, scale);
  if (numbers.dtype != at::kDouble || numbers.device.is_cpu()) {
    return at::_foreach_div_(numbers.gradients, here);
  }
  std::vector<at::Tensor> quotients = at::_foreach_div(numbers.gradients, here);
  check_numbers(numbers, /*one=*/flag, flag);
  numbers.gradients = std::move(quotients);
}

/// What check_finite() looks for beside infs and NaNs in gradients. All may be undefined.
struct CheckWith {
  at::Tensor one{};     ///< 0-dim fp32 on the flag's device; wanted where `number` is there
  at::Tensor scale{};   ///< 0-dim fp32: gradients that an inf comes of when divided by it count
  at::Tensor number{};  ///< 0-dim fp32 on the flag's device, not the host: counts like a gradient
  bool again = false;   ///< the kernel that unscales has looked at the gradients before
};

/// Sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any gradient is not finite. Neither the gradients
/// are changed nor their versions. Reads each gradient once; for reads of devices see DeviceFlags.
inline void check_finite(const std::vector<GradientBatch>& batches, at::Tensor& found_inf,
                         const CheckWith& with = {}) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  const at::Device home = found_inf.device();
  DeviceFlags flags(found_inf);
  at::Tensor number = with.number;
  for (const GradientBatch& batch : batches) {
    at::Tensor& flag = flags.on(batch.device);
    const bool is_home = batch.device == home;
    if (batch.device.is_cpu() && !with.scale.defined()) {
      check_finite(batch, flag, is_home ? with.one : at::Tensor());
      continue;
    }
    GradientBatch amaxes = amaxes_of(batch);
    std::vector<at::Tensor>& values = amaxes.gradients;
    if (values.empty()) continue;
    if (with.scale.defined()) divide_and_check(amaxes, with.scale, flag);
    const bool takes_number = number.defined() && is_home && amaxes.dtype == at::kFloat;
    if (takes_number) values.push_back(std::exchange(number, {}));
    const at::Tensor& one = takes_number ? with.one : flag;
    if (with.scale.defined() || with.again) {
      check_numbers_exactly(amaxes, one, flag);
    } else {
      check_numbers(amaxes, one, flag);
    }
  }
  if (number.defined()) check_numbers({{home, at::kFloat}, {number}}, with.one, found_inf);
  flags.gather();
}

}  // namespace torchamp::detail
