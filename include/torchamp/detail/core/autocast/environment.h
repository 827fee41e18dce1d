// SPDX-License-Identifier: BSD-3-Clause
// What TORCHAMP_POLICY, or an extra's trial, has guards do whatever they are given.
#pragma once

#include <memory>
#include <string>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Reads the policy in a file; errors begin with `call`.
using PolicyFileReader = std::shared_ptr<const PolicyData> (*)(const std::string& call,
                                                               const std::string& path);

/// Which torchamp/policy_text.h registers; null where no source file includes that.
inline PolicyFileReader policy_file_reader = nullptr;

/// The policy that TORCHAMP_POLICY, being `text`, names.
std::shared_ptr<const PolicyData> environment_policy(const std::string& text,
                                                     PolicyFileReader read_file);

/// What overrides the guards of a thread whose policy this is, which may be null.
const GuardOverride& guard_override(const ThreadPolicy* policy);

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/autocast/environment-inl.h"  // IWYU pragma: export
#endif
