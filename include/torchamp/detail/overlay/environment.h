// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/parse.h"

namespace torchamp::detail {

/// What the environment variable TORCHAMP_POLICY makes of all guards of the process.
struct EnvironmentOverride {
  bool off = false;  // "off": guards run disabled
  /// "standard", "torch" or "file:PATH": in place of any other policy; else null.
  std::shared_ptr<const PolicyData> policy;
};

inline EnvironmentOverride read_environment(const char* value) {
  const std::string text = value == nullptr ? "" : value;
  if (text.empty()) return {};
  if (text == "off") return {.off = true, .policy = nullptr};
  if (text == "standard") return {.off = false, .policy = unedited(BaseTable::standard)};
  if (text == "torch") return {.off = false, .policy = unedited(BaseTable::torch)};
  TORCH_CHECK(text.starts_with("file:"), "TORCHAMP_POLICY is '", text,
              "'. Set it to off, standard, torch or file:PATH, or unset it.");
  const std::string call = "TORCHAMP_POLICY: torchamp::load_policy", path = text.substr(5);
  const std::string file = read_policy_file(call, path);
  return {.off = false,
          .policy = PolicyParser(call + ": '" + path + "'", /*parse_fp8=*/nullptr)
                        .parse(text_before_modules(file))};
}

/// Read once, at the first guard. A bad value is an error at every guard.
inline const EnvironmentOverride& environment_override() {
  // Never destroyed: static objects' destructors may use guards.
  static const auto& override =
      *new EnvironmentOverride(read_environment(std::getenv("TORCHAMP_POLICY")));
  return override;
}

}  // namespace torchamp::detail
