// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "torchamp/detail/text.h"
#include "torchamp/version.h"

// Note [Versions of LibTorch]
// torchamp takes LibTorch 2.6 to 2.15, and newer ones as far as they go. What differs between them
// is here, or asks TORCHAMP_LIBTORCH where it needs a header that most programs do not
// (`git grep TORCHAMP_LIBTORCH` lists these places), or is told by types:
//   before 2.12  kinds of a thread's slot are an 8-bit enum (detail/overlay/runtime.h)
//   before 2.11  c10d's Reducer takes other arguments (detail/distributed/reducer.h). LibTorch's
//                cache keeps casts that were made without gradients, and gives them to a later
//                forward of the region, whose gradients are lost: begin another region for
//                evaluation, as TrainingStep::evaluate does

/// @cond
/// The LibTorch that is compiled against: 215 for 2.15.
#define TORCHAMP_LIBTORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if TORCHAMP_LIBTORCH < 206
#error "torchamp needs LibTorch 2.6 or later."
#endif
/// @endcond

namespace torchamp::detail {

/// The types of device that have autocast.
#if TORCHAMP_LIBTORCH >= 207
inline constexpr const auto& autocast_devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
#else
inline constexpr std::array autocast_devices{at::kCPU, at::kCUDA, at::kXPU,         at::kIPU,
                                             at::kHPU, at::kXLA,  at::kPrivateUse1, at::kMPS};
#endif

/// fp16 or bf16.
inline bool is_16_bit(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

enum class Fp64 { unknown, yes, no };

/// The facts about a device type that LibTorch does not reveal. (It reveals kernels, also fused
/// ones, and pinned memory.)
struct DeviceFacts {
  at::DeviceType type;
  bool (*is_built_in)() = nullptr;  ///< whether this LibTorch has it; null: if a backend is loaded
  /// Whether its own autocast kernels follow the lists in LibTorch's headers; else the CPU's.
  bool follows_cuda_lists = true;
  bool fp32_regions = false;   ///< whether autocast to fp32 is allowed, as in torch.autocast
  Fp64 fp64 = Fp64::unknown;   ///< whether it computes in fp64
  bool unscales_bf16 = false;  ///< whether ATen's kernel that unscales takes bf16
  bool fused = true;  ///< whether its fused optimizers, if any, heed the scale and the flag
};

/// Types of device without a row have the defaults.
inline constexpr DeviceFacts device_facts[] = {
    {.type = at::kCPU,
     .is_built_in = [] { return true; },
     .follows_cuda_lists = false,
     .fp64 = Fp64::yes,
     .unscales_bf16 = true},
    {.type = at::kCUDA,
     .is_built_in = [] { return at::hasCUDA(); },
     .fp32_regions = true,
     .fp64 = Fp64::yes},
    {.type = at::kXPU, .is_built_in = [] { return at::hasXPU(); }, .fp64 = Fp64::no},  // some have
    {.type = at::kMPS,  // fused: heeded only from pytorch pull request 186360 on
     .is_built_in = [] { return at::hasMPS(); },
     .fp64 = Fp64::no,
     .fused = false},
    {.type = at::kHPU, .fp64 = Fp64::no},
    {.type = at::kMTIA, .fp64 = Fp64::no},
    {.type = at::kMAIA, .fp64 = Fp64::no},
    {.type = at::kPrivateUse1},
};

/// Of an external backend (kPrivateUse1), set before its first use, instead of its row; or null.
inline const DeviceFacts* facts_of_own_backend = nullptr;

inline DeviceFacts facts_of(at::DeviceType type) {
  if (type == at::kPrivateUse1 && facts_of_own_backend) return *facts_of_own_backend;
  for (const DeviceFacts& facts : device_facts) {
    if (facts.type == type) return facts;
  }
  return {.type = type};
}

/// Whether there is such a device, as far as LibTorch knows without touching it.
inline bool device_is_present(at::DeviceType type) {
  const DeviceFacts facts = facts_of(type);
  return facts.is_built_in ? facts.is_built_in() : c10::impl::hasDeviceGuardImpl(type);
}

/// Of types that have autocast.
inline constexpr std::size_t device_count = autocast_devices.size();

/// "cuda", or a number where LibTorch has no such type.
[[gnu::cold]] inline std::string name_of(at::DeviceType device) {
  return c10::isValidDeviceType(device) ? c10::DeviceTypeName(device, /*lower_case=*/true)
                                        : std::to_string(static_cast<int>(device));
}

/// Index of `device` among the devices that have autocast; an error naming `call` for any other.
inline std::size_t device_index(at::DeviceType device, const char* call) {
  const auto& all = autocast_devices;
  const auto found = std::find(all.begin(), all.end(), device);
  TORCH_CHECK(found != all.end(),
              joined({call, ": LibTorch has no autocast for the device type '", name_of(device),
                      "'. Pass torch::kCPU, torch::kCUDA or another device type that has it."}));
  return static_cast<std::size_t>(found - all.begin());
}

inline at::DispatchKey autocast_key(at::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

/// LibTorch's autocast switch and dtype of a thread for one device type.
struct DeviceAutocastState {
  at::DeviceType device;
  at::ScalarType dtype;
  bool enabled;

  /// The calling thread's.
  static DeviceAutocastState of(at::DeviceType device) {
    return {device, at::autocast::get_autocast_dtype(device),
            at::autocast::is_autocast_enabled(device)};
  }

  /// Sets it on the calling thread.
  void apply() const {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }

  bool operator==(const DeviceAutocastState&) const = default;
};

/// A level of the calling thread's autocast nesting, whose end LibTorch's weight cache awaits.
class Nesting {
 public:
  int enter() {
    number_ = ++guards;
    return inside_ = at::autocast::increment_nesting();
  }

  /// Closes the level, with inner ones left open, and returns the depth then. Closes nothing if it
  /// was closed already. Warns, for the destructor `guard`, if a later guard has not ended.
  int leave(const char* guard) const {
    if (guards-- > number_) {
      TORCH_WARN(joined(
          {guard,
           ": a guard that was made later on this thread has not ended. When it ends, it restores "
           "the state that it found, so autocast may stay on. End guards in reverse order: make "
           "them local variables."}));
    }
    int depth = at::autocast::decrement_nesting();
    if (depth < inside_ - 1) return at::autocast::increment_nesting();  // it was closed already
    while (depth >= inside_) depth = at::autocast::decrement_nesting();
    return depth;
  }

 private:
  static inline thread_local int guards = 0;  // that have not ended

  int inside_ = 0;
  int number_ = 0;  // of this one among them
};

}  // namespace torchamp::detail
