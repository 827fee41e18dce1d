// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief AutocastGuard: a region in which ops cast their arguments as a policy says.

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstddef>
#include <optional>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/overlay/region.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What an AutocastGuard sets. An aggregate, for designated initialisers:
/// `AutocastGuard g(torch::kCUDA, {.dtype = torch::kBFloat16});`
struct AutocastOptions {
  /// fp16 or bf16, on CUDA also fp32. Unset: the device's current autocast dtype, which an
  /// enclosing guard may have set (at first fp16 on CUDA, bf16 on a CPU).
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// False: no casts in this region, whatever surrounds it.
  bool enabled = true;
  /// Whether casts of fp32 weights are kept until the outermost guard ends. Unset: as it is.
  /// All threads share what is kept, by weight and not by dtype: give false where two threads use
  /// one weight on one device at once, one in fp16 and the other in bf16. Each would get the dtype
  /// that the other has cast to.
  std::optional<bool> cache_enabled = std::nullopt;
  /// Unset: the enclosing guard's; at the outermost, Policy::standard().
  std::optional<Policy> policy = std::nullopt;
  /// How long casts of weights are kept, and by whom. Unset: `false` in `cache_enabled` means
  /// WeightCache::none; otherwise inherited; at the outermost guard LibTorch's. Errors:
  /// `cache_enabled = false` with a value other than none, true with none.
  std::optional<WeightCache> cache = std::nullopt;
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
/// quick comparison: `off`, `standard`, `torch` or `file:PATH` (a text as in policy_text.h, which
/// some source file of the program includes, or what save_policy() has written, whose part about
/// modules is passed over; an fp8 rule there is an error).
///
/// A region of a device that is not there (CUDA without a CUDA device, MPS in a LibTorch built
/// without it), and a dtype that the device's autocast does not support (fp32 on a CPU, say), warn
/// once in a program and run disabled, as in torch.autocast. Errors, without any change of state: a
/// device type without autocast, a dtype that is not floating, also with {.enabled = false}.
/// Source: torch/amp/autocast_mode.py.
class AutocastGuard {
 public:
  /// Begins a region for all devices of this type; its end is that of the guard's scope.
  [[nodiscard]] explicit AutocastGuard(at::DeviceType device, const AutocastOptions& options = {})
      : region_(device, options.dtype, options.enabled, options.cache_enabled, options.cache,
                options.policy ? options.policy->data() : nullptr) {}

  /// Begins a region with this dtype, as {.dtype = dtype} does. A template so that `{}` means the
  /// options.
  template <std::same_as<at::ScalarType> Dtype>
  [[nodiscard]] AutocastGuard(at::DeviceType device, Dtype dtype)
      : AutocastGuard(device, AutocastOptions{.dtype = dtype}) {}

  /// Begins a region for all devices of the type of `device`; its index does not matter.
  [[nodiscard]] explicit AutocastGuard(at::Device device, const AutocastOptions& options = {})
      : AutocastGuard(device.type(), options) {}
  /// Begins a region with this dtype for all devices of the type of `device`.
  template <std::same_as<at::ScalarType> Dtype>
  [[nodiscard]] AutocastGuard(at::Device device, Dtype dtype)
      : AutocastGuard(device.type(), dtype) {}

  // Pinned: there is no empty state to move from, and the order of destruction is the scope's.
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard(AutocastGuard&&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  AutocastGuard& operator=(AutocastGuard&&) = delete;
  static void* operator new(std::size_t) = delete;
  static void* operator new[](std::size_t) = delete;

 private:
  detail::AutocastRegion region_;
};

}  // namespace TORCHAMP_NAMESPACE
