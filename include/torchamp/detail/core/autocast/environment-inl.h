// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/detail/core/autocast/environment.h"
#include "torchamp/detail/core/base/system.h"
#include "torchamp/detail/core/base/text.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY std::shared_ptr<const PolicyData> environment_policy(const std::string& text,
                                                                   PolicyFileReader read_file) {
  if (text == "standard") return unedited(BaseTable::standard);
  if (text == "torch") return unedited(BaseTable::torch);
  const bool is_file = text.starts_with("file:");
  if (!is_file || read_file == nullptr) {
    TORCHAMP_CHECK(
        false, "TORCHAMP_POLICY is '", text,
        is_file ? "', and this program does not read policy files. Include torchamp/policy_text.h "
                  "in one of its source files, or link torchamp::library."
                : "'. Set it to off, standard, torch or file:PATH, or unset it.");
  }
  return read_file("TORCHAMP_POLICY: torchamp::load_policy", text.substr(5));
}

/// Never destroyed: static objects' destructors may use guards.
inline const GuardOverride* read_environment() {
  const char* const value = environment_variable("TORCHAMP_POLICY");
  const std::string text = value == nullptr ? "" : value;
  auto made = std::make_unique<GuardOverride>();
  made->off = text == "off";
  if (!text.empty() && !made->off) made->policy = environment_policy(text, policy_file_reader);
  return made.release();
}

TORCHAMP_BODY const GuardOverride& guard_override(const ThreadPolicy* policy) {
  if (policy != nullptr && policy->guards) return *policy->guards;
  // Read once, at the first guard; a bad value is an error at every guard.
  static const GuardOverride& environment = *read_environment();
  return environment;
}

}  // namespace TORCHAMP_NAMESPACE::detail
