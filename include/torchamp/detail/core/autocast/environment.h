// SPDX-License-Identifier: BSD-3-Clause
// How TORCHAMP_POLICY, or an extra's trial, overrides the options of guards.
#pragma once

#include <memory>
#include <string>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Reads the policy in a file; errors begin with `call`.
using PolicyFileReader = std::shared_ptr<const PolicyData> (*)(const std::string& call,
                                                               const std::string& path);

/// torchamp/policy_text.h registers it; null if no source file includes that header.
inline PolicyFileReader policy_file_reader = nullptr;

/// The policy for the value `text` of TORCHAMP_POLICY.
std::shared_ptr<const PolicyData> environment_policy(const std::string& text,
                                                     PolicyFileReader read_file);

/// The override for guards of a thread with this policy, which may be null.
const GuardOverride& guard_override(const ThreadPolicy* policy);

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/autocast/environment-inl.h"  // IWYU pragma: export
#endif
