// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/data.h"

namespace torchamp::detail {

/// What guards do whatever they are given: those of the process as the environment variable
/// TORCHAMP_POLICY says, or those of a thread for the time of an extra's trial.
struct GuardOverride {
  GuardOverride() = default;
  GuardOverride(const GuardOverride&) = delete;
  GuardOverride& operator=(const GuardOverride&) = delete;
  virtual ~GuardOverride() = default;

  /// The dtype of a guard that is made now, and asks for `asked` and to be `enabled` or not.
  virtual at::ScalarType dtype_of_guard(at::DeviceType /*on*/, at::ScalarType asked,
                                        bool /*enabled*/) const {
    return asked;
  }

  bool off = false;                          ///< guards run disabled
  std::shared_ptr<const PolicyData> policy;  ///< in place of any other; or null
  bool module_policies = false;              ///< whether those of modules hold all the same
};

/// Reads the policy in a file; errors begin with `call`.
using PolicyFileReader = std::shared_ptr<const PolicyData> (*)(const std::string& call,
                                                               const std::string& path);

/// Which torchamp/policy_text.h registers; null where no source file includes that.
inline PolicyFileReader& policy_file_reader() {
  static PolicyFileReader reader = nullptr;
  return reader;
}

/// The policy that TORCHAMP_POLICY, being `text`, names.
inline std::shared_ptr<const PolicyData> environment_policy(const std::string& text,
                                                            PolicyFileReader read_file) {
  if (text == "standard") return unedited(BaseTable::standard);
  if (text == "torch") return unedited(BaseTable::torch);
  TORCH_CHECK(text.starts_with("file:"), "TORCHAMP_POLICY is '", text,
              "'. Set it to off, standard, torch or file:PATH, or unset it.");
  TORCH_CHECK(read_file != nullptr, "TORCHAMP_POLICY is '", text,
              "', and this program does not read policy files. Include torchamp/policy_text.h in "
              "one of its source files, or link torchamp::library.");
  return read_file("TORCHAMP_POLICY: torchamp::load_policy", text.substr(5));
}

/// Read once, at the first guard. A bad value is an error at every guard.
inline const GuardOverride& environment_override() {
  // Never destroyed: static objects' destructors may use guards.
  static const GuardOverride* const override = [] {
    const char* const value = std::getenv("TORCHAMP_POLICY");
    const std::string text = value == nullptr ? "" : value;
    auto made = std::make_unique<GuardOverride>();
    made->off = text == "off";
    if (!text.empty() && !made->off) {
      made->policy = environment_policy(text, policy_file_reader());
    }
    return made.release();
  }();
  return *override;
}

/// What overrides the guards of a thread whose policy this is, or null.
inline const GuardOverride& guard_override(const ThreadPolicy* policy) {
  return policy != nullptr && policy->guards ? *policy->guards : environment_override();
}

}  // namespace torchamp::detail
