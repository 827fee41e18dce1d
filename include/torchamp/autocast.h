// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/compile_policy.h"
#include "torchamp/detail/device_autocast_state.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/environment.h"
#include "torchamp/detail/policy_data.h"
#include "torchamp/detail/policy_scope.h"
#include "torchamp/detail/thread_policy.h"
#include "torchamp/policy.h"

namespace torchamp {

/// What an AutocastGuard sets. An aggregate, for designated initialisers:
/// `AutocastGuard g(torch::kCUDA, {.dtype = torch::kBFloat16});`
struct AutocastOptions {
  /// fp16 or bf16, on CUDA also fp32. Unset: the device's current autocast dtype, which an
  /// enclosing guard may have set (at first fp16 on CUDA, bf16 on a CPU).
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// False: no casts in this region, whatever surrounds it.
  bool enabled = true;
  /// Whether casts of fp32 weights are kept until the outermost guard ends. Unset: as it is.
  std::optional<bool> cache_enabled = std::nullopt;
  /// Unset: the enclosing guard's; at the outermost, Policy::standard().
  std::optional<Policy> policy = std::nullopt;
};

/// A region of the calling thread in which ops cast their arguments as a Policy says.
///
///     torch::Tensor loss;
///     {
///       torchamp::AutocastGuard autocast(torch::kCUDA);
///       loss = torch::mse_loss(model->forward(data), target);
///     }
///     loss.backward();
///
/// Construction switches autocast for `device` on (or off) and sets dtype, cache flag and policy.
/// Destruction puts back what was there at construction, whatever happened in between, exceptions
/// and calls to at::autocast included; the outermost guard's end drops the cached casts of weights.
/// Regions nest, on one device or several.
///
/// Threads: the state is the calling thread's. It follows LibTorch's own autocast state to
/// autograd's workers, at::launch and at::wrapPropagateTLSState, and nowhere else. A guard must be
/// destroyed by the thread that made it: another one leaves all state as it is and warns. The first
/// guard with a new policy registers kernels with LibTorch's dispatcher: make it before threads
/// start that run ops under autocast.
///
/// Never reads the device.
///
/// The environment variable TORCHAMP_POLICY, read at the first guard, overrides all guards for a
/// quick comparison: `off`, `standard`, `torch` or `file:PATH` (a text as in policy_text.h).
///
/// As in torch.autocast, a CUDA region without a CUDA device, and a dtype that the device's
/// autocast does not support (fp32 on a CPU, say), warn once in a program and run disabled. Errors,
/// without any change of state: a device type without autocast, a dtype that is not floating.
/// Source: torch/amp/autocast_mode.py.
class AutocastGuard {
 public:
  [[nodiscard]] explicit AutocastGuard(at::DeviceType device, const AutocastOptions& options = {})
      : AutocastGuard(Checked(device, options), options) {}

  /// The same as {.dtype = dtype}. A template so that `{}` means the options.
  template <std::same_as<at::ScalarType> Dtype>
  [[nodiscard]] AutocastGuard(at::DeviceType device, Dtype dtype)
      : AutocastGuard(device, AutocastOptions{.dtype = dtype}) {}

  // Pinned: there is no empty state to move from, and the order of destruction is the scope's.
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard(AutocastGuard&&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  AutocastGuard& operator=(AutocastGuard&&) = delete;
  static void* operator new(std::size_t) = delete;
  static void* operator new[](std::size_t) = delete;

  ~AutocastGuard() {
    if (!policy_scope_.end_of("~AutocastGuard")) return;
    if (at::autocast::decrement_nesting() == 0 || dtype_changed_) at::autocast::clear_cache();
    before_.apply();
    at::autocast::set_autocast_cache_enabled(cache_enabled_before_);
  }

 private:
  /// The arguments after all checks, so that the constructor changes nothing before it cannot fail.
  struct Checked {
    Checked(at::DeviceType device, const AutocastOptions& options);
    at::DeviceType device;
    at::ScalarType dtype;
    bool enabled;
    std::shared_ptr<const detail::ThreadPolicy> policy;  // null: the thread's stays
  };

  AutocastGuard(Checked checked, const AutocastOptions& options)
      : before_(detail::DeviceAutocastState::of(checked.device)),
        cache_enabled_before_(at::autocast::is_autocast_cache_enabled()),
        dtype_changed_(before_.dtype != checked.dtype),
        policy_scope_(std::move(checked.policy)) {
    at::autocast::set_autocast_enabled(checked.device, checked.enabled);
    at::autocast::set_autocast_dtype(checked.device, checked.dtype);
    if (options.cache_enabled) at::autocast::set_autocast_cache_enabled(*options.cache_enabled);
    // LibTorch's cache does not tell one 16-bit dtype from the other.
    if (at::autocast::increment_nesting() > 1 && dtype_changed_) at::autocast::clear_cache();
  }

  detail::DeviceAutocastState before_;
  bool cache_enabled_before_;
  bool dtype_changed_;
  detail::PolicyScope policy_scope_;
};

/// Forgets the casts of fp32 weights that LibTorch keeps until the outermost guard ends.
/// Call it after writing to a weight in place inside a region, by a plain optimizer's own step, say
/// (steps of a GradScaler or of a fused optimizer do so themselves): the cache knows a weight by
/// its identity and would go on giving the cast of its old values. All threads share the cache; any
/// may call this at any time, since what is dropped is cast again.
inline void clear_weight_cache() {
  at::autocast::clear_cache();
}

namespace detail {

/// Whether `device` runs autocast in `dtype`; warns once for each dtype if not. Not a floating
/// dtype: an error.
inline bool dtype_is_usable(at::DeviceType device, at::ScalarType dtype) {
  TORCH_CHECK(c10::isFloatingType(dtype), "AutocastGuard: the dtype ", dtype,
              " is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
  if (dtype == at::kHalf || dtype == at::kBFloat16) return true;
  if (device == at::kCUDA && dtype == at::kFloat) return true;  // as torch.autocast has it

  static std::atomic<std::uint64_t> warned_of = 0;  // a bit for each dtype
  const std::uint64_t bit = std::uint64_t{1} << static_cast<unsigned>(dtype);
  if ((warned_of.fetch_or(bit) & bit) == 0 || c10::WarningUtils::get_warnAlways()) {
    TORCH_WARN("AutocastGuard: autocast on ", device, " supports fp16 and bf16, not ", dtype,
               ". The region runs with autocast disabled. Pass torch::kBFloat16 or torch::kHalf, "
               "or {.enabled = false} to leave fp32 alone.");
  }
  return false;
}

inline bool device_is_present(at::DeviceType device) {
  if (device != at::kCUDA || at::hasCUDA()) return true;
  TORCH_WARN_ONCE(
      "AutocastGuard: there is no CUDA device. CUDA regions run with autocast disabled. Pass "
      "torch::kCPU for a CPU.");
  return false;
}

}  // namespace detail

inline AutocastGuard::Checked::Checked(at::DeviceType on_device, const AutocastOptions& options)
    : device(on_device) {
  const std::size_t index = detail::device_index(device, "AutocastGuard");
  dtype = options.dtype.value_or(at::autocast::get_autocast_dtype(device));
  const detail::EnvironmentOverride& environment = detail::environment_override();
  enabled = options.enabled && !environment.off && detail::device_is_present(device) &&
            detail::dtype_is_usable(device, dtype);

  const detail::ThreadPolicy* outer = detail::thread_policy();
  std::shared_ptr<const detail::PolicyData> data;
  if (environment.policy) {
    data = environment.policy->data();
  } else if (options.policy) {
    data = options.policy->data();
  } else if (outer && outer->inherited) {
    data = outer->inherited;
  } else {
    data = Policy::standard().data();
  }
  if (enabled) detail::compile_once(*data, device);
  const detail::PolicyData* in_force = enabled ? data.get() : nullptr;
  if (outer && outer->inherited == data && outer->in_force[index].get() == in_force) return;
  auto inner = std::make_shared<detail::ThreadPolicy>();
  if (outer) *inner = *outer;
  inner->in_force[index] = enabled ? data : nullptr;
  inner->inherited = std::move(data);
  policy = std::move(inner);
}

}  // namespace torchamp
