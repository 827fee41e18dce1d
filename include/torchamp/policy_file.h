// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Files that hold a policy and the policies of a model's modules.

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/policy/parse.h"
#include "torchamp/fp8.h"
#include "torchamp/module_policy.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// The contents of a file that load_policies() has read.
struct LoadedPolicies {
  /// For the guards.
  Policy policy = Policy::standard();
  /// For the model's modules.
  ModulePolicies modules{};
  /// The file's path.
  std::string path{};

  /// Sets the modules' policies: ModulePolicies::apply_to(), whose errors then name the file.
  /// Guards take `policy`.
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
/// NAME is a name or pattern as in ModulePolicies. A module's part that begins with `policy
/// standard` or `policy torch` does not inherit the rules before the modules. `#` starts a comment.
/// Errors name the file, the line (or module) and the reason.
inline LoadedPolicies load_policies(const std::string& path) {
  const std::string call = "torchamp::load_policies";
  const std::string place = c10::str(call, ": '", path, "'");
  const std::string text = detail::read_policy_file(call, path);
  const auto parts = detail::parts_of_policies(text);
  TORCH_CHECK(parts.size() == 1 || detail::says_something(parts[0].text), place,
              ": nothing stands before the line 'module ", parts[1].module,
              "'. The text begins with 'policy standard' or 'policy torch', which holds for all "
              "ops.");
  LoadedPolicies loaded;
  loaded.path = path;
  detail::PolicyParser parser(place);
  loaded.policy = Policy(parser.parse(parts[0].text));
  std::set<std::string_view> modules;
  for (const auto& part : parts) {
    if (&part == &parts[0]) continue;
    const Policy policy(parser.parse_part(*loaded.policy.data(), part.text, part.first_line));
    TORCH_CHECK(!part.module.empty(), call, ": '", path, "' has a line 'module' without a name.");
    TORCH_CHECK(modules.insert(part.module).second, call, ": '", path, "' has two lines 'module ",
                part.module, "'. Put what is under them under one.");
    loaded.modules.set(part.module, policy);
  }
  return loaded;
}

}  // namespace TORCHAMP_NAMESPACE
