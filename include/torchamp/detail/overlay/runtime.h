// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "torchamp/detail/devices.h"

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
// Bump `version` when the layout of anything reachable from here changes: libraries built with
// different layouts then keep apart.

/// What all shared libraries of a process have in common.
struct SharedRuntime {
  static constexpr int version = 3;

  /// The overlays of one device.
  struct Overlays {
    std::vector<std::string> ops;  // "aten::add.Tensor"; an op's index is its index in OverlayTable
    std::vector<bool> has_native;  // LibTorch had a kernel of its own before

    /// The number of overlays if the op has none.
    std::size_t index_of(std::string_view op) const {
      std::size_t index = 0;
      while (index < ops.size() && ops[index] != op) ++index;
      return index;
    }
  };

  std::mutex mutex;                             // guards `overlays`, and registering kernels
  std::array<Overlays, device_count> overlays;  // by device

  const std::string slot_text = "torchamp policy";
  const std::string_view slot_name = slot_text;
};

/// Null if nobody has made it yet.
inline SharedRuntime* find_shared_runtime(const std::string& op_name) {
  const auto op = c10::Dispatcher::singleton().findSchema({op_name, ""});
  if (!op) return nullptr;
  const std::int64_t address = op->schema().arguments().at(0).default_value()->toInt();
  return reinterpret_cast<SharedRuntime*>(address);
}

inline void pin_this_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&pin_this_library), &info) != 0) {
    // Null for the main program, which stays anyway.
    (void)dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

inline SharedRuntime& make_shared_runtime() {
  pin_this_library();
  const std::string op_name = "torchamp::_runtime_v" + std::to_string(SharedRuntime::version);
  if (SharedRuntime* const found = find_shared_runtime(op_name)) return *found;
  auto* const runtime = new SharedRuntime;
  try {
    auto* const library = new torch::Library(torch::Library::FRAGMENT, "torchamp", std::nullopt,
                                             "torchamp/detail/overlay/runtime.h", __LINE__);
    const std::string address = std::to_string(reinterpret_cast<std::int64_t>(runtime));
    library->def((op_name + "(int address=" + address + ") -> ()").c_str());
    return *runtime;
  } catch (const c10::Error&) {
    // Another library defined it between our look and our definition.
    SharedRuntime* const found = find_shared_runtime(op_name);
    if (found == nullptr) throw;
    delete runtime;
    return *found;
  }
}

/// The process's runtime. Any thread; takes no lock after the first call.
inline SharedRuntime& shared_runtime() {
  static SharedRuntime& runtime = make_shared_runtime();
  return runtime;
}

/// The slot of c10::ThreadLocalDebugInfo that holds the thread's policy. A template, so that only
/// the branch for the running LibTorch's type of kind is compiled.
template <class Kind = c10::DebugInfoKind>
Kind policy_slot() {
  if constexpr (std::is_enum_v<Kind>) {
    // An 8-bit enum before LibTorch 2.12, whose own kinds count from 0.
    return static_cast<Kind>(0xC0 + SharedRuntime::version);
  } else {
    return Kind(&shared_runtime().slot_name);
  }
}

}  // namespace torchamp::detail
