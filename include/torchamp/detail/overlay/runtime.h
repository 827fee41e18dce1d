// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/operator_name.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <dlfcn.h>

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
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/text.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [One runtime per process]
// A header-only library compiled with hidden visibility into a host and its plugins has a copy of
// each inline variable in each of them. What must exist once (the overlays, and the name of the
// thread's policy slot) therefore hangs on the one registry that all of them share by name:
// LibTorch's dispatcher. The first to come makes a SharedRuntime on the heap and defines an op
// whose schema carries its address; the others read it there. It is never freed: kernels and
// threads' states point into it until the process ends.
//
// The kernels and virtual tables that LibTorch is handed lie in the shared library that made them.
// So every library that uses the runtime pins itself: dlclose() then leaves it mapped, and loading
// it again finds it as it was.
//
// The schema also says which version of torchamp made the runtime, and its TORCHAMP_LAYOUT. Another
// version with that layout uses the runtime as its own, the first one's overlays included; with
// another layout it must not touch what it finds, and says so. The name and the arguments of the op
// are for all versions to come. (Version 0.1 had another op and is not noticed.)

/// What all shared libraries of a process have in common.
struct SharedRuntime {
  /// The overlays of one device, by their index in every OverlayTable.
  struct Overlays {
    std::unordered_map<std::string, std::size_t> index_of;  // by full name: "aten::add.Tensor"
    std::vector<bool> has_native;                           // LibTorch had a kernel of its own

    std::size_t size() const { return has_native.size(); }
  };

  std::mutex mutex;                             // guards `overlays`, and registering kernels
  std::array<Overlays, device_count> overlays;  // by device

  std::atomic<KeptWeights*> kept_weights = nullptr;  // never freed, like the runtime

  const std::string slot_text = "torchamp policy";
  const std::string_view slot_name = slot_text;
};

/// Where a runtime is, and who made it.
struct RuntimeRecord {
  static constexpr const char* op = "torchamp::_runtime";

  int64_t layout = 0;
  std::string version{};
  int64_t address = 0;

  static RuntimeRecord of(const SharedRuntime* runtime) {
    return {TORCHAMP_LAYOUT,
            std::to_string(TORCHAMP_VERSION_MAJOR) + '.' + std::to_string(TORCHAMP_VERSION_MINOR) +
                '.' + std::to_string(TORCHAMP_VERSION_PATCH),
            reinterpret_cast<int64_t>(runtime)};
  }

  /// With address 0 if nobody has made one yet.
  static RuntimeRecord find() {
    const auto found = c10::Dispatcher::singleton().findSchema({op, ""});
    if (!found) return {};
    const auto& arguments = found->schema().arguments();
    return {arguments.at(0).default_value()->toInt(),
            arguments.at(1).default_value()->toStringRef(),
            arguments.at(2).default_value()->toInt()};
  }

  /// "torchamp::_runtime(int layout=…, str version=…, int address=…) -> ()". (The text would take
  /// longer to parse.)
  c10::FunctionSchema schema() const {
    const auto argument = [](const char* name, const c10::TypePtr& type, c10::IValue value) {
      return c10::Argument(name, type, std::nullopt, std::move(value));
    };
    return {op,
            "",
            {argument("layout", c10::IntType::get(), layout),
             argument("version", c10::StringType::get(), version),
             argument("address", c10::IntType::get(), address)},
            {}};
  }
};

/// The shared library, or program, that this is compiled into.
inline const char* this_library() {
  Dl_info info;
  return dladdr(reinterpret_cast<const void*>(&this_library), &info) != 0 ? info.dli_fname : "";
}

inline void pin_this_library() {
  // Null for the main program, which stays anyway.
  [[maybe_unused]] static void* const pinned =
      dlopen(this_library(), RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

/// The runtime at `found`. Error: one of another layout than `ours`.
inline SharedRuntime& shared_with(const RuntimeRecord& found, const RuntimeRecord& ours) {
  TORCH_CHECK(found.layout == ours.layout, "torchamp: ", this_library(),
              " was built against torchamp ", ours.version, ", but torchamp ", found.version,
              " is in use in this process already, and what the two would have to share has "
              "different layouts (",
              ours.layout, " and ", found.layout,
              "). Build the program and its plugins against one version.");
  return *reinterpret_cast<SharedRuntime*>(found.address);
}

inline SharedRuntime& make_shared_runtime() {
  if (const RuntimeRecord found = RuntimeRecord::find(); found.address != 0) {
    SharedRuntime& shared = shared_with(found, RuntimeRecord::of(nullptr));
    pin_this_library();
    return shared;
  }
  pin_this_library();
  auto* const runtime = new SharedRuntime;
  const RuntimeRecord ours = RuntimeRecord::of(runtime);
  try {
    // Never destroyed: its end would take the op away.
    new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerDef(
        ours.schema(), "torchamp/detail/overlay/runtime.h"));
    return *runtime;
  } catch (const c10::Error&) {
    delete runtime;
    // Another library defined it between our look and our definition.
    const RuntimeRecord theirs = RuntimeRecord::find();
    if (theirs.address == 0) throw;
    return shared_with(theirs, ours);
  }
}

/// The process's runtime. Any thread; takes no lock after the first call. Error, at every call: see
/// shared_with().
inline SharedRuntime& shared_runtime() {
  static SharedRuntime& runtime = make_shared_runtime();
  return runtime;
}

/// What is kept of weights. Null where nothing has been, and where another version of torchamp owns
/// the process: what cannot make a guard keeps nothing either.
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

/// Whether there is a kernel for the op under a device's autocast key.
inline bool has_autocast_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  const c10::DispatchKey key = autocast_key(device);
  return op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key);
}

/// Whether LibTorch itself has an autocast kernel for the op and device, overlays left out of
/// account.
inline bool has_native_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  SharedRuntime& runtime = shared_runtime();
  const auto& overlays = runtime.overlays[device_index(device, "has_native_kernel")];
  const std::scoped_lock lock(runtime.mutex);
  if (!has_autocast_kernel(op, device)) return false;
  const auto overlay = overlays.index_of.find(full_name(op.operator_name()));
  return overlay == overlays.index_of.end() || overlays.has_native[overlay->second];
}

}  // namespace torchamp::detail
