// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. Policies as text: printed, in a string or in a file.

#include <ostream>
#include <string>
#include <string_view>

#include "torchamp/detail/core/autocast/environment.h"
#include "torchamp/detail/extras/policy_text/parse.h"
#include "torchamp/detail/extras/policy_text/print.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// Allows TORCHAMP_POLICY to name a file.
inline bool let_environment_name_files() {
  policy_file_reader = &read_environment_policy;
  return true;
}
#ifndef TORCHAMP_COMPILED  // else torchamp/compiled.h does this
inline const bool environment_names_files = let_environment_name_files();
#endif

}  // namespace detail

/// Prints the table: the edits, then for each rule its ops on a CPU and on CUDA, with the effect of
/// LibTorch's own kernels (see Policy::effect).
inline std::ostream& operator<<(std::ostream& out, const Policy& policy) {
  detail::print_policy(out, *policy.data());
  return out;
}

/// The policy as text that parse_policy() reads: its base table and its edits, one per line.
///
///     policy standard
///     fp32: ops::norm, pow
///     lower_precision when bfloat16: softmax.int
///     fp8(only_worthwhile): ops::dense
///
/// Errors: a rule with a predicate, unless later edits have removed the rule; an op with the name
/// of a family, such as "ops::norm" of a library called "ops" (name the op's overloads instead).
inline std::string to_text(const Policy& policy) {
  std::string text = "policy " + std::string(detail::to_string(policy.data()->base)) + '\n';
  for (const std::string& line : detail::lines_of_edits("torchamp::to_text", *policy.data())) {
    if (!line.empty()) text += line + '\n';
  }
  return text;
}

/// Returns the policy that `text` describes: see to_text(). '#' starts a comment; empty lines are
/// ignored. Errors name the line and the reason.
inline Policy parse_policy(std::string_view text) {
  return Policy(detail::PolicyParser("torchamp::parse_policy").parse(text));
}

/// Reads a policy from a file with the text of to_text(). Errors are the errors of parse_policy(),
/// and a file that cannot be read; they also name the file.
inline Policy load_policy(const std::string& path) {
  const std::string call = "torchamp::load_policy";
  detail::PolicyParser parser(call + ": '" + path + "'");
  return Policy(parser.parse(detail::read_policy_file(call, path)));
}

}  // namespace TORCHAMP_NAMESPACE
