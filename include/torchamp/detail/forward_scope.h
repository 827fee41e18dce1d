// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "torchamp/detail/compile_policy.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/environment.h"
#include "torchamp/detail/policy_data.h"
#include "torchamp/detail/policy_scope.h"
#include "torchamp/detail/thread_policy.h"

namespace torchamp::detail {

/// What a ModulePolicies gave a module: its dotted name in the model, and a policy or none.
struct ModulePolicy {
  std::string name;
  std::shared_ptr<const PolicyData> policy;
};

/// The calling thread's state with `policy` in force, on the devices where autocast is on.
inline std::shared_ptr<const ThreadPolicy> thread_policy_with(
    const std::shared_ptr<const PolicyData>& policy) {
  const ThreadPolicy* outer = thread_policy();
  auto inner = std::make_shared<ThreadPolicy>();
  if (outer) *inner = *outer;
  inner->inherited = policy;
  const auto& devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  for (std::size_t i = 0; i < device_count; ++i) {
    if (at::autocast::is_autocast_enabled(devices[i])) {
      inner->tables[i] = overlay_table(*policy, devices[i]);
    }
  }
  return inner;
}

/// The forward of a module: under the module's policy, and a user scope of its name for whoever
/// records (LibTorch's profiler, CastRecorder).
class ForwardScope {
 public:
  explicit ForwardScope(const ModulePolicy* module) {
    if (module == nullptr) return;
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      record_.emplace(std::move(*callbacks));
      record_->before(module->name);
    }
    const EnvironmentOverride& environment = environment_override();
    if (module->policy && !environment.off && !environment.policy) {
      policy_.emplace(thread_policy_with(module->policy));
    }
  }

 private:
  std::optional<at::RecordFunction> record_;
  std::optional<PolicyScope> policy_;
};

}  // namespace torchamp::detail
