// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. Files that hold a policy and the policies of a model's modules.

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "torchamp/detail/extras/policy_text/parse.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/labs/module_policy.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// The contents of a file that load_policies() has read.
struct LoadedPolicies {
  /// The policy for the guards.
  Policy policy = Policy::standard();
  /// The policies for the model's modules.
  ModulePolicies modules{};
  /// The file's path.
  std::string path{};

  /// Sets the modules' policies like ModulePolicies::apply_to(), with errors that name the file.
  /// For guards use `policy`.
  std::vector<std::string> apply_to(torch::nn::Module& model) const {
    try {
      return modules.apply_to(model);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "LoadedPolicies::apply_to: what torchamp::load_policies read in '", path,
                  "' does not fit the model: ", error.what_without_backtrace());
    }
  }
};

/// Reads a file of to_text() or save_policy(): a policy, and after each line `module NAME` the
/// edits for that module.
///
///     policy torch
///     lower_precision: addmm, gelu
///     module head
///     fp32: addmm
///
/// NAME is a name or pattern of ModulePolicies. A module inherits the rules before the first
/// `module` line, unless its part begins with `policy standard` or `policy torch`. `#` starts a
/// comment. Errors name the file, the line (or module) and the reason.
inline LoadedPolicies load_policies(const std::string& path) {
  const std::string call = "torchamp::load_policies";
  LoadedPolicies loaded;
  loaded.path = path;
  detail::PoliciesOfModules modules;
  loaded.policy = Policy(detail::PolicyParser(call + ": '" + path + "'")
                             .parse(detail::read_policy_file(call, path), &modules));
  for (const auto& [module, policy] : modules) loaded.modules.set(module, Policy(policy));
  return loaded;
}

}  // namespace TORCHAMP_NAMESPACE
