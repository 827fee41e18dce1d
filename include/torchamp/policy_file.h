// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief A policy and those of a model's modules, in one file.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/fp8/run.h"
#include "torchamp/detail/policy/parse.h"
#include "torchamp/detail/policy/parts.h"
#include "torchamp/module_policy.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What load_policies() has read.
struct LoadedPolicies {
  /// For the guards.
  Policy policy = Policy::standard();
  /// For the model's modules.
  ModulePolicies modules{};
  /// The file that it was.
  std::string path{};

  /// Gives the model's modules their policies: ModulePolicies::apply_to(), with its errors where
  /// the file is for a model with other modules, which name the file. Guards are given `policy`.
  std::vector<std::string> apply_to(torch::nn::Module& model) const {
    try {
      return modules.apply_to(model);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "LoadedPolicies::apply_to: what torchamp::load_policies read in '", path,
                  "' does not fit the model: ", error.what_without_backtrace());
    }
  }
};

/// Reads a text as to_text() and save_policy() write it: a policy, and after each line
/// `module NAME` what is different in that module.
///
///     policy torch
///     lower_precision: addmm, gelu
///     module head
///     fp32: addmm
///
/// `#` starts a comment. Errors name the file, the line (or the module) and what is wrong with it.
inline LoadedPolicies load_policies(const std::string& path) {
  const std::string call = "torchamp::load_policies";
  const std::string place = c10::str(call, ": '", path, "'");
  const auto parts = detail::parts_of_policies(detail::read_policy_file(call, path));
  TORCH_CHECK(parts.size() == 1 || detail::says_something(parts[0].second), place,
              ": nothing stands before the line 'module ", parts[1].first,
              "'. The text begins with 'policy standard' or 'policy torch', which holds for all "
              "ops.");
  LoadedPolicies loaded;
  loaded.path = path;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [module, text] = parts[i];
    const Policy policy(
        detail::PolicyParser(place, &detail::parse_fp8_rule<at::Tensor>).parse(text));
    if (i == 0) {
      loaded.policy = policy;
    } else {
      TORCH_CHECK(!module.empty(), call, ": '", path, "' has a line 'module' without a name.");
      for (std::size_t k = 1; k < i; ++k) {
        TORCH_CHECK(parts[k].first != module, call, ": '", path, "' has two lines 'module ", module,
                    "'. Put what is under them under one.");
      }
      loaded.modules.set(module, policy);
    }
  }
  return loaded;
}

}  // namespace TORCHAMP_NAMESPACE
