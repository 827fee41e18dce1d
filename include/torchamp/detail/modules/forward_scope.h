// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/overlay/compile.h"
#include "torchamp/detail/overlay/environment.h"
#include "torchamp/detail/overlay/policy_scope.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/rule.h"

namespace torchamp::detail {

/// What a ModulePolicies gave a module: its dotted name in the model, and a policy or none.
struct ModulePolicy {
  std::string name;
  std::shared_ptr<const PolicyData> policy;
};

/// The calling thread's state with `policy` in force, on the devices where autocast is on.
inline std::shared_ptr<const ThreadPolicy> thread_policy_with(
    const std::shared_ptr<const PolicyData>& policy) {
  auto inner = copy_of(thread_policy());
  inner->inherited = policy;
  const auto& devices = autocast_devices;
  for (std::size_t i = 0; i < device_count; ++i) {
    if (at::autocast::is_autocast_enabled(devices[i])) {
      prepare_region("ModulePolicies", *policy, inner->casts, devices[i],
                     at::autocast::get_autocast_dtype(devices[i]));
      inner->in_force[i] = policy;
    }
  }
  if (const OpRule* rule = policy->op_rule()) {
    inner->op_rule_usage = rule->make_usage(inner->op_rule_usage);
  }
  return inner;
}

/// The forward of a module: under the module's policy, and a user scope of its name for whoever
/// records (LibTorch's profiler, CastRecorder).
class ForwardScope {
 public:
  explicit ForwardScope(const ModulePolicy* module) : policy_(policy_of(module)) {
    if (module == nullptr) return;
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      record_.emplace(std::move(*callbacks));
      record_->before(module->name);
    }
  }

 private:
  static std::shared_ptr<const ThreadPolicy> policy_of(const ModulePolicy* module) {
    if (module == nullptr || module->policy == nullptr) return nullptr;
    const GuardOverride& guards = guard_override(thread_policy());
    if (guards.off || (guards.policy && !guards.module_policies)) return nullptr;
    return thread_policy_with(module->policy);
  }

  PolicyScope policy_;
  std::optional<at::RecordFunction> record_;
};

}  // namespace torchamp::detail
