// SPDX-License-Identifier: BSD-3-Clause
// State that exists once per process.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/system.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// ---- Devices that have autocast -----------------------------------------------------------------

/// The types of device that have autocast.
#if TORCHAMP_LIBTORCH >= 207
inline constexpr const auto& autocast_devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
#else
inline constexpr std::array autocast_devices{at::kCPU, at::kCUDA, at::kXPU,         at::kIPU,
                                             at::kHPU, at::kXLA,  at::kPrivateUse1, at::kMPS};
#endif
inline constexpr std::size_t device_count = autocast_devices.size();

/// Whether there is such a device. This does not initialise the device.
inline bool device_is_present(at::DeviceType type) {
  const DeviceFacts facts = facts_of(type);
  return facts.is_built_in ? facts.is_built_in() : c10::impl::hasDeviceGuardImpl(type);
}

/// "cuda", or a number if LibTorch has no such type.
inline std::string name_of(at::DeviceType device) {
  return c10::isValidDeviceType(device) ? c10::DeviceTypeName(device, /*lower_case=*/true)
                                        : std::to_string(static_cast<int>(device));
}

/// Index of `device` among the devices that have autocast; an error naming `call` for any other.
inline std::size_t device_index(at::DeviceType device, const char* call) {
  const auto& all = autocast_devices;
  const auto found = std::find(all.begin(), all.end(), device);
  TORCHAMP_CHECK(found != all.end(), call, ": LibTorch has no autocast for the device type '",
                 name_of(device),
                 "'. Pass torch::kCPU, torch::kCUDA or another device type that has it.");
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

  /// The calling thread's state.
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

// ---- What is kept of weights --------------------------------------------------------------------

// Note [Weights that are kept]
// LibTorch caches casts of weights for a region. Other caches are extras: casts (weight_cache.h)
// and other forms of weights are in a store of the process (detail/extras/weights/derived.h). The
// core reports events to the store through KeptWeights, and the core's own writes as in
// Note [Weights that are written]. A WeightCasts casts weights for a region. Without these extras
// all are null.

/// How long a cast or another form of a weight is kept.
struct WeightKeep {
  enum class Until : std::uint8_t {
    not_kept,      ///< only for the call
    region_ends,   ///< the outermost guard's end
    weights_step,  ///< the next step of any optimizer that the library observes
    dropped,       ///< until the program drops it, or the weight is destroyed
  };
  Until until = Until::not_kept;
  std::uint64_t region = 0;  ///< of the outermost guard; 0 if that began before the store
};

/// The store of casts and other forms of weights. The core reports events to it. Any thread.
class KeptWeights {
 public:
  /// The outermost guard begins; returns the region's number, which is not 0.
  virtual std::uint64_t begin_region() = 0;

  /// Drops entries of the region, from all threads, and entries of destroyed weights.
  virtual void end_region(std::uint64_t region) = 0;

  /// These weights, and all tensors in their memory, may have changed without a counted write.
  virtual void changed(at::TensorList weights) = 0;

  /// Any weight may have other values now.
  virtual void all_changed() = 0;

  /// Drops all.
  virtual void clear() = 0;

 protected:
  ~KeptWeights() = default;
};

/// Casts weights for a region instead of LibTorch. Immutable.
class WeightCasts {
 public:
  /// Called before a region of a device: ensures that all ops that cast to 16 bits run through
  /// torchamp's kernels.
  virtual void prepare(at::DeviceType device) const = 0;

  /// Whether LibTorch's cache is in use as well.
  virtual bool uses_libtorch_cache() const = 0;

  /// Casts the weights among the arguments at `positions`. The arguments are at the stack's end and
  /// are replaced there; the stack keeps its size and its memory.
  virtual void cast(const c10::FunctionSchema& schema, const std::vector<std::size_t>& positions,
                    at::ScalarType dtype, at::DeviceType device,
                    torch::jit::Stack& stack) const = 0;

 protected:
  ~WeightCasts() = default;
};

/// Casts weights for torchamp/weight_cache.h, which registers it; null if no source file includes
/// that header.
inline const WeightCasts* registered_weight_casts = nullptr;

// ---- Products on CPUs ---------------------------------------------------------------------------

/// The kernels for products of a 16-bit dtype on CPUs: see Note [Products on CPUs].
enum class ProductKernels : std::uint8_t { undecided, libtorch, fp32 };

/// The kinds of products, for each of which a CPU may be slow in 16 bits.
enum class ProductFamily : std::uint8_t { matrices, convolutions, layers };
inline constexpr std::size_t product_families = 3;

/// One family of products in one dtype.
struct ProductState {
  std::atomic<ProductKernels> kernels = ProductKernels::undecided;
  std::optional<bool> is_slow;  // by LibTorch's kernels; unset: not measured
};

/// By family. The runtime's mutex guards all that is not atomic.
struct CpuProductsState {
  std::array<ProductState, product_families> fp16, bf16;
  std::optional<ProductKernels> choice;  // undecided: the faster; unset: the environment's, unread
  std::array<bool, product_families> are_registered{};

  /// fp16 or bf16.
  std::array<ProductState, product_families>& of(at::ScalarType dtype) {
    return dtype == at::kHalf ? fp16 : bf16;
  }
};

// ---- The runtime --------------------------------------------------------------------------------

// Note [One runtime per process]
// If a header-only library is compiled with hidden visibility into a host and its plugins, each of
// them has a copy of each inline variable. But torchamp's autocast kernels, and the name of the
// thread's policy slot, must exist once. So torchamp uses LibTorch's dispatcher, which all of them
// share by name: the first library creates a SharedRuntime and defines an op whose schema carries
// its address. The SharedRuntime is never freed: kernels and threads' states point into it until
// the process ends.
//
// LibTorch gets pointers to kernels and virtual tables in the shared library that registers them.
// So every library that uses the runtime pins itself: it stays mapped after dlclose().
//
// The schema also has the version of torchamp that created the runtime, and its TORCHAMP_LAYOUT.
// Another version with the same layout shares the runtime; a version with another layout must not
// use it, and throws. The name and the arguments of the op must never change.

/// An autocast kernel of torchamp.
struct KnownKernel {
  std::size_t index;  // in the rules of every policy
  bool has_native;    // LibTorch had its own kernel
};

/// The state that all shared libraries of a process share.
struct SharedRuntime {
  using Kernels = std::unordered_map<c10::OperatorName, KnownKernel>;

  std::mutex mutex;  // guards `kernels`, registering kernels, and making `kept_weights`
  std::array<Kernels, device_count> kernels;  // by device

  std::atomic<KeptWeights*> kept_weights = nullptr;  // never freed, like the runtime

  CpuProductsState cpu_products;

  const std::string slot_text = "torchamp policy";
  const std::string_view slot_name = slot_text;
};

/// Its schema is "(int layout=…, str version=…, int address=…) -> ()".
inline const char* const runtime_op = "torchamp::_runtime";

/// The runtime that a library has created; null if there is none. Error: it has another layout.
inline SharedRuntime* find_runtime() {
  const auto found = c10::Dispatcher::singleton().findSchema({runtime_op, ""});
  if (!found) return nullptr;
  const auto value = [&](std::size_t i) -> const c10::IValue& {
    return *found->schema().arguments().at(i).default_value();
  };
  TORCHAMP_CHECK(
      value(0).toInt() == TORCHAMP_LAYOUT, "torchamp: ", this_library(),
      " was built against torchamp " TORCHAMP_VERSION_TEXT ", but torchamp ",
      value(1).toStringRef(),
      " is in use in this process already, and their shared state has different layouts (",
      TORCHAMP_LAYOUT, " and ", value(0).toInt(),
      "). Build the program and its plugins against one version.");
  return reinterpret_cast<SharedRuntime*>(value(2).toInt());
}

/// Defines an op that all shared libraries find until the process ends.
inline void define_for_all(const std::string& schema) {
  // Never destroyed: its destructor would remove the op.
  new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().registerDef(torch::jit::parseSchema(schema), "torchamp"));
}

inline SharedRuntime& make_shared_runtime() {
  SharedRuntime* runtime = find_runtime();
  pin_this_library();
  if (runtime != nullptr) return *runtime;
  runtime = new SharedRuntime;
  try {
    define_for_all(std::string(runtime_op) + "(int layout=" + std::to_string(TORCHAMP_LAYOUT) +
                   ", str version=\"" TORCHAMP_VERSION_TEXT "\", int address=" +
                   std::to_string(reinterpret_cast<std::uintptr_t>(runtime)) + ") -> ()");
  } catch (const c10::Error&) {
    delete runtime;
    runtime = find_runtime();  // another library has defined it since our check
    if (runtime == nullptr) throw;
  }
  return *runtime;
}

/// The process's runtime. Any thread; takes no lock after the first call. Error, at every call: a
/// runtime of another layout is in use.
inline SharedRuntime& shared_runtime() {
  static SharedRuntime& runtime = make_shared_runtime();
  return runtime;
}

/// The store of casts of weights. Null if nothing was ever stored, and if another version of
/// torchamp owns the process: then no guard of this version exists, so nothing is stored.
inline KeptWeights* kept_weights() noexcept {
  try {
    return shared_runtime().kept_weights.load(std::memory_order_acquire);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

/// The slot of c10::ThreadLocalDebugInfo that holds the thread's policy. A template, so that only
/// the branch for the running LibTorch's type of kind is compiled.
template <class Kind = c10::DebugInfoKind>
Kind policy_slot() {
  [[maybe_unused]] SharedRuntime& runtime = shared_runtime();
  if constexpr (std::is_enum_v<Kind>) {
    // An 8-bit enum before LibTorch 2.12, whose own kinds count from 0.
    return static_cast<Kind>(0xC0 + TORCHAMP_LAYOUT);
  } else {
    return Kind(&runtime.slot_name);
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail
