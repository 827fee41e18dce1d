// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "torchamp/detail/policy/data.h"

namespace torchamp::detail {

/// What the environment variable TORCHAMP_POLICY makes of all guards of the process.
struct EnvironmentOverride {
  bool off = false;  // "off": guards run disabled
  /// "standard", "torch" or "file:PATH": in place of any other policy; else null.
  std::shared_ptr<const PolicyData> policy;
};

/// Reads the policy in a file; errors begin with `call`.
using PolicyFileReader = std::shared_ptr<const PolicyData> (*)(const std::string& call,
                                                               const std::string& path);

/// Which torchamp/policy_text.h registers; null where no source file includes that.
inline PolicyFileReader& policy_file_reader() {
  static PolicyFileReader reader = nullptr;
  return reader;
}

inline EnvironmentOverride read_environment(const char* value, PolicyFileReader read_file) {
  const std::string text = value == nullptr ? "" : value;
  if (text.empty()) return {};
  if (text == "off") return {.off = true, .policy = nullptr};
  if (text == "standard") return {.off = false, .policy = unedited(BaseTable::standard)};
  if (text == "torch") return {.off = false, .policy = unedited(BaseTable::torch)};
  TORCH_CHECK(text.starts_with("file:"), "TORCHAMP_POLICY is '", text,
              "'. Set it to off, standard, torch or file:PATH, or unset it.");
  TORCH_CHECK(read_file != nullptr, "TORCHAMP_POLICY is '", text,
              "', and this program does not read policy files. Include torchamp/policy_text.h in "
              "one of its source files, or link torchamp::library.");
  return {.off = false,
          .policy = read_file("TORCHAMP_POLICY: torchamp::load_policy", text.substr(5))};
}

/// Read once, at the first guard. A bad value is an error at every guard.
inline const EnvironmentOverride& environment_override() {
  // Never destroyed: static objects' destructors may use guards.
  static const auto& override = *new EnvironmentOverride(
      read_environment(std::getenv("TORCHAMP_POLICY"), policy_file_reader()));
  return override;
}

}  // namespace torchamp::detail
