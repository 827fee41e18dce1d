// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. AutocastGuard: a region in which a policy decides to which dtype ops cast their
/// arguments.

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstddef>
#include <optional>
#include <utility>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/autocast/region.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// Options of an AutocastGuard. An aggregate, for designated initialisers: `AutocastGuard
/// g(torch::kCUDA, {.dtype = torch::kBFloat16});`
struct AutocastOptions {
  /// fp16 or bf16; on CUDA also fp32. Unset: the dtype of the enclosing guard for this device; in
  /// the outermost guard LibTorch's autocast dtype, which is fp16 on CUDA and bf16 on a CPU unless
  /// the program has changed it.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// False: no casts in this region, even inside another region.
  bool enabled = true;
  /// Whether casts of fp32 weights are cached until the outermost guard ends. Unset: inherited; in
  /// the outermost guard LibTorch's flag, which is true by default. All threads share LibTorch's
  /// cache, which does not distinguish dtypes. Pass false if one thread uses a weight in fp16 while
  /// another thread uses the same weight in bf16. The cache also holds casts of leaves that are
  /// already destroyed. In a long region that creates many leaves, choose WeightCache::region
  /// (weight_cache.h), whose memory is bounded.
  std::optional<bool> cache_enabled = std::nullopt;
  /// Unset: the policy of the enclosing guard; in the outermost guard Policy::standard().
  std::optional<Policy> policy = std::nullopt;
  /// How long casts of weights are cached, and by which cache. Unset: WeightCache::none if
  /// `cache_enabled` is false, otherwise inherited; in the outermost guard LibTorch's cache.
  /// Errors: `cache_enabled = false` with a value other than none; `cache_enabled = true` with
  /// none.
  std::optional<WeightCache> cache = std::nullopt;
};

/// A region of the calling thread in which ops cast their arguments to the dtypes that a Policy
/// selects.
///
///     torch::Tensor loss;
///     {
///       torchamp::AutocastGuard autocast(torch::kCUDA);
///       loss = torch::mse_loss(model->forward(data), target);
///     }
///     loss.backward();
///
/// Construction switches autocast for `device` on (or off) and sets dtype, cache flag and policy.
/// Destruction restores the state from before construction, even after an exception or calls of
/// at::autocast. The end of the outermost guard drops the cached casts of weights. Regions nest, on
/// one device or several. A guard warns if it ends before a guard that was created later.
///
/// Threads: the state is thread-local. LibTorch copies it, with its own autocast state, to
/// autograd's workers and to the threads of at::launch and at::wrapPropagateTLSState. Other threads
/// do not get it: see AutocastState. The thread that creates a guard must destroy it. If another
/// thread destroys it, the guard warns and leaves all state unchanged. The first guard with a new
/// policy registers kernels with LibTorch's dispatcher: create it before you start threads that run
/// ops under autocast.
///
/// The environment variable TORCHAMP_POLICY overrides all guards; the first guard reads it. Its
/// values are `off`, `standard`, `torch` and `file:PATH`. The file has the format of to_text() and
/// save_policy(). Rules for modules in it are ignored, and an fp8 rule in it is an error. `file:`
/// needs torchamp/policy_text.h in one source file. Never synchronises.
///
/// If the device is missing (CUDA without a CUDA device, MPS in a LibTorch built without MPS), a
/// guard warns once per program and casts nothing, like torch.autocast. The same happens if the
/// device's autocast does not support the dtype (fp32 on a CPU). Errors, without a change of state:
/// a device type without autocast; a dtype that is not floating-point, even with {.enabled =
/// false}. Source: torch/amp/autocast_mode.py.
class AutocastGuard {
 public:
  /// Begins a region for all devices of this type, to the end of the guard's scope.
  [[nodiscard]] explicit AutocastGuard(at::DeviceType device, const AutocastOptions& options = {})
      : region_(device, options) {}

  /// Begins a region with this dtype, like {.dtype = dtype}. The constructor is a template, so that
  /// `AutocastGuard guard(device, {})` calls the constructor with options.
  template <std::same_as<at::ScalarType> Dtype>
  [[nodiscard]] AutocastGuard(at::DeviceType device, Dtype dtype)
      : AutocastGuard(device, AutocastOptions{.dtype = dtype}) {}

  /// Begins a region with this dtype and these options. Error: `options.dtype` is set to another
  /// dtype.
  template <std::same_as<at::ScalarType> Dtype>
  [[nodiscard]] AutocastGuard(at::DeviceType device, Dtype dtype, AutocastOptions options)
      : AutocastGuard(device, with(dtype, std::move(options))) {}

  /// Begins a region for all devices of the type of `device`; its index does not matter.
  [[nodiscard]] explicit AutocastGuard(at::Device device, const AutocastOptions& options = {})
      : AutocastGuard(device.type(), options) {}
  /// Begins a region with this dtype for all devices of the type of `device`.
  template <std::same_as<at::ScalarType> Dtype>
  [[nodiscard]] AutocastGuard(at::Device device, Dtype dtype)
      : AutocastGuard(device.type(), dtype) {}
  /// Begins a region with this dtype and these options for all devices of the type of `device`.
  template <std::same_as<at::ScalarType> Dtype>
  [[nodiscard]] AutocastGuard(at::Device device, Dtype dtype, AutocastOptions options)
      : AutocastGuard(device.type(), dtype, std::move(options)) {}

  // Pinned: there is no empty state to move from, and the order of destruction is the scope's.
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard(AutocastGuard&&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  AutocastGuard& operator=(AutocastGuard&&) = delete;
  static void* operator new(std::size_t) = delete;
  static void* operator new[](std::size_t) = delete;

 private:
  static AutocastOptions with(at::ScalarType dtype, AutocastOptions options) {
    TORCHAMP_CHECK_VALUE(!options.dtype || *options.dtype == dtype, "AutocastGuard: the dtype is ",
                         dtype, " as an argument and ", *options.dtype,
                         " in the options. Leave one of them out.");
    options.dtype = dtype;
    return options;
  }

  detail::AutocastRegion region_;
};

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/core/autocast/region-inl.h"  // IWYU pragma: export
#endif
