// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"

namespace torchamp::detail {

/// Gradients of one device and dtype, as one batch kernel takes them.
struct GradientBatch : TensorKind {
  std::vector<at::Tensor> gradients{};
};

/// Where fp16 gradients are an error, as dividing them by the scale would lose what it was for.
enum class HalfGradients { refused, allowed };

/// The same values without the conjugate and the negative bit, which kernels that write in place do
/// not look at.
[[gnu::cold]] inline at::Tensor resolved(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
}

/// The gradient as kernels see all of it: the same tensor, or one to take its place.
[[gnu::cold]] inline at::Tensor seen_whole(const at::Tensor& gradient, HalfGradients half) {
  if (gradient.is_sparse() && gradient.scalar_type() == at::kHalf &&
      half == HalfGradients::allowed && !gradient.is_coalesced()) {
    return gradient.coalesce();  // adding up what shares an index may overflow
  }
  return resolved(gradient);
}

/// Whether kernels take `gradient` as it is.
inline bool is_plain(const at::Tensor& gradient) {
  const at::ScalarType dtype = gradient.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && gradient.layout() == at::kStrided &&
         gradient.is_non_overlapping_and_dense();
}

/// The dense strided tensor that holds all values of `gradient`, for kernels to change in place.
/// Throws for what they cannot take, with `where` to name it.
[[gnu::cold]] inline at::Tensor values_of(const at::Tensor& gradient, HalfGradients half,
                                          ErrorPlace where) {
  const at::ScalarType dtype = gradient.scalar_type();
  TORCHAMP_CHECK_VALUE(
      half == HalfGradients::allowed || dtype != at::kHalf, where(),
      " is fp16. Keep the parameters in fp32 and let AutocastGuard cast them: an fp16 gradient "
      "divided by the scale underflows. (A fused optimizer's step takes fp16 gradients.)");
  TORCHAMP_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble || is_16_bit(dtype) ||
                           dtype == at::kComplexFloat || dtype == at::kComplexDouble,
                       where(), " is ", dtype, ". Gradients are fp32, fp64, bf16, or complex.");
  TORCHAMP_CHECK_VALUE(gradient.layout() == at::kStrided || gradient.is_sparse(), where(),
                       " has the layout ", gradient.layout(),
                       ". Gradients are dense or sparse COO.");
  at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  if (values.is_complex()) values = at::view_as_real(values);
  TORCHAMP_CHECK_VALUE(
      !repeats_elements(values), where(),
      " is an expanded tensor, whose elements share memory. Give .grad a clone() of it.");
  return values;
}

inline bool has_half_gradients(const torch::optim::Optimizer& optimizer) {
  return any_gradient(
      optimizer, [](const at::Tensor& gradient) { return gradient.scalar_type() == at::kHalf; });
}

/// The gradients that a collection holds already: one that several places of an optimizer lead to,
/// as the weight of a module that a model has registered twice, is to be changed once.
/// (With std::unordered_set, step and update take 15 % more instructions for 1000 small gradients.)
class SeenGradients {
 public:
  /// Of at most `count` gradients.
  explicit SeenGradients(std::size_t count) : slots_(std::bit_ceil(2 * count + 1)) {}

  /// Whether it is new.
  bool insert(const c10::TensorImpl* gradient) {
    const std::size_t last = slots_.size() - 1;
    const auto address = reinterpret_cast<std::uintptr_t>(gradient);
    std::size_t at = (address * 0x9E3779B97F4A7C15u >> 32) & last;
    for (; slots_[at] != nullptr; at = (at + 1) & last) {
      if (slots_[at] == gradient) return false;
    }
    slots_[at] = gradient;
    return true;
  }

 private:
  std::vector<const c10::TensorImpl*> slots_;  // a power of two, less than half of them taken
};

/// Throws where `optimizer` would step the tensor `parameter`, which is not all there is to step.
inline void check_steps(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                        ErrorPlace where) {
  const WeightMeta* const meta = weight_meta_of(parameter);
  if (!meta || dynamic_cast<const DefersClips*>(&optimizer)) return;
  meta->refuse_plain_step(where);
}

/// Every gradient of every group of `optimizer`, once, by device and dtype. Parameters whose
/// gradients have the conjugate or the negative bit are given resolved() ones. Nothing has been
/// changed where this throws. `call` begins the error texts. `refuses_shared` is asked where
/// several parameters have the same gradient, which a step that divides would divide twice.
inline std::vector<GradientBatch> gradients_of(torch::optim::Optimizer& optimizer,
                                               HalfGradients half, const char* call,
                                               c10::function_ref<bool()> refuses_shared = {}) {
  std::vector<GradientBatch> batches;
  std::vector<at::Tensor> to_change, changed;  // parameters and their new gradients
  const auto& groups = optimizer.param_groups();
  std::size_t count = 0;
  for (const auto& group : groups) count += group.params().size();
  SeenGradients seen(count);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& parameters = groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      if (!parameter.defined()) continue;
      at::Tensor gradient = gradient_of(parameter);
      if (!gradient.defined()) continue;
      const auto where = [&] {
        return joined(
            {call, ": the gradient of parameter ", i, " in group ", g, ' ', parameter.sizes()});
      };
      check_steps(optimizer, parameter, where);
      const bool may_change = gradient.is_sparse() || gradient.is_conj() || gradient.is_neg();
      if (may_change) gradient = seen_whole(gradient, half);
      const bool is_new = may_change && !gradient.is_same(gradient_of(parameter));
      if (is_new) {
        to_change.push_back(parameter);
        changed.push_back(gradient);
      }
      if (!seen.insert((is_new ? parameter : gradient).unsafeGetTensorImpl())) {
        const auto shares_it = [&](const at::Tensor& one) {
          return !one.is_same(parameter) && gradient_of(one).is_same(gradient);
        };
        TORCHAMP_CHECK_VALUE(
            !refuses_shared || !refuses_shared() || !any_parameter(optimizer, shares_it), call,
            ": the gradient of a parameter ", parameter.sizes(),
            " is that of another one, too, and the fused step would divide it twice. Give one of "
            "them a clone(), or call unscale_ before step.");
        continue;
      }
      at::Tensor values =
          is_plain(gradient) ? std::move(gradient) : values_of(gradient, half, where);
      std::vector<at::Tensor>& batch = group_of(batches, TensorKind::of(values)).gradients;
      if (batch.empty()) batch.reserve(count);
      batch.push_back(std::move(values));
    }
  }
  for (std::size_t i = 0; i < to_change.size(); ++i) {
    to_change[i].mutable_grad() = std::move(changed[i]);
  }
  return batches;
}

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

/// Calls `function` with fp32 copies of the gradients, of bounded size together, until it has had
/// all, and copies back what it has made of them.
template <class Function>
[[gnu::cold]] void through_fp32(const GradientBatch& batch, const Function& function,
                                int64_t elements_at_once = int64_t{1} << 24) {
  const at::TensorList all = batch.gradients;
  for (std::size_t begin = 0; begin < all.size();) {
    GradientBatch wide{{batch.device, at::kFloat}};
    int64_t elements = 0;
    for (const at::Tensor& gradient : all.slice(begin)) {
      elements += gradient.numel();
      if (elements > elements_at_once && !wide.gradients.empty()) break;
      wide.gradients.push_back(at::empty_like(gradient, gradient.options().dtype(at::kFloat)));
    }
    const at::TensorList narrow = all.slice(begin, wide.gradients.size());
    at::_foreach_copy_(wide.gradients, narrow);
    function(wide);
    at::_foreach_copy_(narrow, wide.gradients);
    begin += wide.gradients.size();
  }
}

/// What check() reads of a batch.
struct LargestValues {
  /// The largest absolute value of each gradient that is not empty, with at least the precision of
  /// fp32; NaN where it has one.
  GradientBatch values;
  at::Tensor flag{};  ///< 0-dim fp32, 0; undefined where one would be a launch of its own
};

/// `zero`, one element of fp32 on the gradients' device, is what the flag is made from.
[[gnu::cold]] inline LargestValues largest_values(const GradientBatch& batch,
                                                  const at::Tensor& zero = {}) {
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
[[gnu::cold]] inline void look_at_on_host(const GradientBatch& batch, const at::Tensor& one,
                                          at::Tensor& flag) {
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
[[gnu::cold]] inline void check(const GradientBatch& batch, at::Tensor& flag,
                                const at::Tensor& one = {}) {
  const at::AutoDispatchBelowADInplaceOrView versions_stay;
  if (batch.device.is_cpu() && unscale_kernel_takes(batch)) {
    return look_at_on_host(batch, one.defined() ? one : at::full({}, 1., flag.options()), flag);
  }
  look_at(largest_values(batch).values, /*any number: these are no gradients*/ flag, flag);
}

/// Multiplies gradients in place by `factor`, 0-dim fp32 on their device (exactly 1 changes
/// nothing), and sets `flag` as check() does for what they were before.
inline void multiply_and_check(const GradientBatch& batch, const at::Tensor& factor,
                               at::Tensor& flag) {
  if (unscale_kernel_takes(batch)) {
    at::_amp_foreach_non_finite_check_and_unscale_(batch.gradients, flag, factor);
  } else if (is_16_bit(batch.dtype)) {
    through_fp32(batch, [&](const GradientBatch& wide) { multiply_and_check(wide, factor, flag); });
  } else {
    check(batch, flag);
    at::_foreach_mul_(batch.gradients, factor.to(batch.dtype));
  }
}

/// Flags of several devices that become one.
class DeviceFlags {
 public:
  [[gnu::cold]] explicit DeviceFlags(const at::Tensor& home) { flags_.push_back(home); }

  [[gnu::cold]] at::Tensor& on(at::Device device) {
    for (at::Tensor& flag : flags_) {
      if (flag.device() == device) return flag;
    }
    return flags_.emplace_back(at::zeros({}, flags_[0].options().device(device)));
  }

  /// Sets the first to 1 if any is. Reads no device, but waits for the others' flags where the
  /// first lies on the host.
  [[gnu::cold]] void gather() {
    for (std::size_t i = 1; i < flags_.size(); ++i) {
      flags_[0].add_(to_device_async(flags_[0].device(), flags_[i])).clamp_max_(1.);
    }
  }

 private:
  std::vector<at::Tensor> flags_;
};

/// Multiplies every gradient in place by `factor(device)`, a 0-dim fp32 tensor there (a factor of
/// exactly 1 changes nothing), and sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any was not finite
/// before. A few kernels for each device and dtype; for reads see DeviceFlags.
[[gnu::cold]] inline void multiply_and_check(const std::vector<GradientBatch>& batches,
                                             c10::function_ref<at::Tensor(at::Device)> factor,
                                             at::Tensor& found_inf) {
  DeviceFlags flags(found_inf);
  std::vector<at::Tensor> factors;  // one for each device
  for (const GradientBatch& batch : batches) {
    std::size_t d = 0;
    while (d < factors.size() && factors[d].device() != batch.device) ++d;
    if (d == factors.size()) factors.push_back(factor(batch.device));
    multiply_and_check(batch, factors[d], flags.on(batch.device));
  }
  flags.gather();
}

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
[[gnu::cold]] inline void check(const std::vector<GradientBatch>& batches, at::Tensor& found_inf,
                                at::Device home, const CheckWith& with = {}) {
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
