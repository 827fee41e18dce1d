// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/kernel.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/catalog.h"

namespace torchamp::detail {

// Note [TorchScript]
// When a scripted function runs in a region with autocast on, LibTorch's JIT rewrites it by op
// lists of its own: it puts a cast op (aten::_autocast_to_reduced_precision or _full_precision)
// before ops on those lists, and runs the result with autocast still on. The dispatcher, and so the
// policy, therefore does see every op; only the JIT's casts stand in its way. They are ops like
// others, so an overlay makes them pass their argument on wherever a torchamp guard is in force on
// the thread. Scripts then follow the policy exactly as C++ does, whichever state they were first
// run in, while threads that use at::autocast without torchamp keep the JIT's casts. Nothing
// process-wide is switched.
class ScriptCastOverlay final : public BoxedKernel {
 public:
  explicit ScriptCastOverlay(at::DeviceType device)
      : device_index_(device_index(device, "ScriptCastOverlay")),
        after_(c10::DispatchKeySet::FULL_AFTER, autocast_key(device)) {}

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
            torch::jit::Stack* stack) const override {
    if (policy_in_force(device_index_) == nullptr) return op.redispatchBoxed(keys & after_, stack);
    torch::jit::drop(*stack, op.schema().arguments().size() - 1);  // leaves `self` as the result
  }

 private:
  std::size_t device_index_;
  c10::DispatchKeySet after_;
};

inline std::unique_ptr<BoxedKernel> make_script_cast_overlay(
    const c10::OperatorHandle&, at::DeviceType device, std::size_t,
    std::optional<c10::SafeKernelFunction>&&) {
  return std::unique_ptr<BoxedKernel>(new ScriptCastOverlay(device));
}

/// Makes the JIT's casts follow Note [TorchScript] on a device.
inline void install_script_cast_overlays(at::DeviceType device) {
  for (const char* name : {"_autocast_to_reduced_precision", "_autocast_to_full_precision"}) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
      install_overlay(op, device, &make_script_cast_overlay);
    }
  }
}

}  // namespace torchamp::detail
