// SPDX-License-Identifier: BSD-3-Clause
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
// factor and finds what is not finite, in one pass. Not every device has it, and CUDA's takes no
// bf16 (pytorch issue 127176), where _foreach_mul_ would round the factor to bf16, too, and launch
// a kernel for each gradient. So 16-bit gradients that it does not take go through fp32 copies.
//
// Where nothing is to be multiplied, a GPU, which waits for memory, should only read: the kernel
// looks at the gradients' largest values. A CPU finds norms faster: where a large gradient's is
// finite, so is the gradient, and the kernel looks at all others.
//
// What else a device is asked costs no launch of its own: a 0 among the gradients comes out of the
// look as a new flag, and a number among the largest values is looked at with them.

/// Whether ATen's kernel that unscales takes such gradients.
inline bool unscale_kernel_takes(const GradientBatch& batch) {
  static const c10::OperatorHandle kernel = c10::Dispatcher::singleton().findSchemaOrThrow(
      "aten::_amp_foreach_non_finite_check_and_unscale_", "");
  if (batch.gradients.empty()) return true;
  const c10::DispatchKeySet keys = batch.gradients[0].key_set();
  if (!kernel.hasKernelForDispatchKey(c10::highestPriorityBackendTypeId(keys))) return false;
  return batch.dtype == at::kFloat || batch.dtype == at::kDouble || batch.dtype == at::kHalf ||
         (batch.dtype == at::kBFloat16 && facts_of(batch.device.type()).unscales_bf16);
}

/// What check() reads of a batch.
struct LargestValues {
  /// The largest absolute value of each gradient that is not empty, with at least the precision of
  /// fp32; NaN where it has one.
  GradientBatch values;
  at::Tensor flag{};  ///< 0-dim fp32, 0; undefined where one would be a launch of its own
};

/// `zero`, one element of fp32 on the gradients' device, is what the flag is made from.
inline LargestValues largest_values(const GradientBatch& batch, const at::Tensor& zero = {}) {
  // One that has gaps in memory would have ATen take all of its list one by one.
  std::vector<at::Tensor> lists[2];
  for (const at::Tensor& gradient : batch.gradients) {
    if (gradient.numel() == 0) continue;
    lists[gradient.is_non_overlapping_and_dense() ? 0 : 1].push_back(gradient);
  }
  const at::ScalarType dtype = is_16_bit(batch.dtype) ? at::kFloat : batch.dtype;
  const bool makes_flag = zero.defined() && dtype == at::kFloat && !lists[0].empty();
  if (makes_flag) lists[0].push_back(zero.view(batch.dtype));
  LargestValues result{{{batch.device, dtype}}};
  for (const std::vector<at::Tensor>& list : lists) {
    if (list.empty()) continue;
    for (at::Tensor& largest :
         at::_foreach_norm(list, std::numeric_limits<double>::infinity(), dtype)) {
      result.values.gradients.push_back(std::move(largest));
    }
    if (makes_flag && &list == &lists[0]) {
      result.flag = std::move(result.values.gradients.back());
      result.values.gradients.pop_back();
    }
  }
  return result;
}

/// Sets `flag`, 0-dim fp32 on their device, to 1 if any of these numbers is not finite. May write
/// to them, but changes none that is finite.
inline void look_at(const GradientBatch& numbers, const at::Tensor& one, at::Tensor& flag) {
  if (numbers.gradients.empty()) return;
  if (unscale_kernel_takes(numbers)) {
    at::_amp_foreach_non_finite_check_and_unscale_(numbers.gradients, flag, one);
  } else {
    const at::Tensor finite = at::stack(numbers.gradients).isfinite().all();
    at::maximum_out(flag, flag, finite.logical_not().to(flag.scalar_type()));
  }
}

/// The same for gradients on the host. Large ones are looked at by their norms first, which only
/// read.
inline void look_at_on_host(const GradientBatch& batch, const at::Tensor& one, at::Tensor& flag) {
  const auto reads_fast = [](const at::Tensor& gradient) {
    constexpr int64_t large = 1 << 15;  // where a norm costs less than the kernel
    return gradient.numel() >= large && gradient.is_non_overlapping_and_dense();
  };
  const bool is_wide = batch.dtype == at::kFloat || batch.dtype == at::kDouble;
  if (!is_wide || std::none_of(batch.gradients.begin(), batch.gradients.end(), reads_fast)) {
    return look_at(batch, one, flag);
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
  look_at(others, one, flag);
}

/// Sets `flag` to 1 if any of the gradients is not finite. They are not changed, nor are their
/// versions. `one`: 0-dim fp32 on their device, if there is one.
inline void check(const GradientBatch& batch, at::Tensor& flag, const at::Tensor& one = {}) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  if (batch.device.is_cpu() && unscale_kernel_takes(batch)) {
    return look_at_on_host(batch, one.defined() ? one : at::full({}, 1., flag.options()), flag);
  }
  look_at(largest_values(batch).values, /*any number: these are no gradients*/ flag, flag);
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

/// What check() looks for, and makes its flag with, beside the gradients. All may be undefined.
struct CheckWith {
  at::Tensor zero{};    ///< one element of fp32 on the flag's device: saves the launch of a 0
  at::Tensor one{};     ///< 0-dim fp32 on the flag's device; wanted where `number` is there
  at::Tensor scale{};   ///< 0-dim fp32: gradients that an inf comes of when divided by it count
  at::Tensor number{};  ///< 0-dim fp32 on the flag's device, not the host: counts like a gradient
};

/// Sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any gradient is not finite; makes it, on `home`,
/// where it is undefined. Neither the gradients are changed nor their versions. One look at each
/// gradient, and one at each one's largest value, or at a number that tells as much; for reads see
/// DeviceFlags.
inline void check(const std::vector<GradientBatch>& batches, at::Tensor& found_inf, at::Device home,
                  const CheckWith& with = {}) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  const auto is_looked_at = [&](const GradientBatch& batch) {
    return batch.device.is_cpu() && !with.scale.defined();
  };
  std::vector<GradientBatch> largest;
  for (const GradientBatch& batch : batches) {
    if (is_looked_at(batch)) continue;
    const bool flags = !found_inf.defined() && batch.device == home;
    LargestValues values = largest_values(batch, flags ? with.zero : at::Tensor());
    largest.push_back(std::move(values.values));
    if (values.flag.defined()) found_inf = values.flag;
  }
  if (!found_inf.defined()) {
    found_inf = at::zeros({}, at::TensorOptions(home).dtype(at::kFloat));
  }
  DeviceFlags flags(found_inf);
  for (const GradientBatch& batch : batches) {
    if (!is_looked_at(batch)) continue;
    check(batch, flags.on(batch.device), batch.device == home ? with.one : at::Tensor());
  }
  at::Tensor number = with.number;
  for (GradientBatch& look : largest) {
    const at::Device device = look.device;
    at::Tensor& flag = flags.on(device);
    std::vector<at::Tensor>& values = look.gradients;
    if (values.empty()) continue;
    if (with.scale.defined()) at::_foreach_div_(values, to_device_async(device, with.scale));
    const bool takes_number = number.defined() && device == home && look.dtype == at::kFloat;
    if (takes_number) values.push_back(std::exchange(number, {}));
    look_at(look, takes_number ? with.one : flag, flag);
  }
  if (number.defined()) look_at({{home, at::kFloat}, {number}}, with.one, found_inf);
  flags.gather();
}
inline void check(const std::vector<GradientBatch>& batches, at::Tensor& found_inf) {
  check(batches, found_inf, found_inf.device());
}

}  // namespace torchamp::detail
