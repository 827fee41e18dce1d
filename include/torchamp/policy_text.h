// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/cast.h"
#include "torchamp/detail/print_policy.h"
#include "torchamp/ops.h"
#include "torchamp/policy.h"

namespace torchamp {

/// The policy as text that parse_policy() reads back: its base table and its edits, a line each.
///
///     policy standard
///     fp32: ops::norm, pow
///     lower_precision when bfloat16: softmax.int
///
/// Error: a rule with a predicate, which is code.
inline std::string to_text(const Policy& policy) {
  std::string text = "policy " + std::string(detail::to_string(policy.data()->base)) + '\n';
  for (const detail::Edit& edit : policy.data()->edits) {
    const std::string line = detail::to_string(edit);
    TORCH_CHECK(
        !edit.when.predicate, "torchamp::to_text: the rule '", line,
        "' depends on a predicate, which is code and has no text. Make that edit in the program.");
    text += line + '\n';
  }
  return text;
}

namespace detail {

/// Splits at `separator` and strips white space; drops empty pieces.
inline std::vector<std::string> split(std::string_view text, char separator) {
  constexpr std::string_view space = " \t\r";
  std::vector<std::string> pieces;
  while (!text.empty()) {
    const auto end = text.find(separator);
    std::string_view piece = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    const auto first = piece.find_first_not_of(space);
    if (first == std::string_view::npos) continue;
    pieces.emplace_back(piece.substr(first, piece.find_last_not_of(space) - first + 1));
  }
  return pieces;
}

/// Reads a policy's text line by line; every error names the line.
class PolicyParser {
 public:
  Policy parse(std::string_view text) {
    for (number_ = 1; !text.empty(); ++number_) {
      const std::string_view line = text.substr(0, text.find('\n'));
      text.remove_prefix(std::min(line.size() + 1, text.size()));
      const auto content = split(line.substr(0, line.find('#')), '\n');
      if (!content.empty()) read(content.front());
    }
    TORCH_CHECK(policy_, call,
                ": the text is empty. It starts with 'policy standard' or 'policy torch'.");
    return *policy_;
  }

 private:
  void read(const std::string& line) {
    if (!policy_) return read_base(line);
    const auto colon = line.find(": ");
    check(colon != std::string::npos, "'", line, "' is not of the form 'fp32: op, op'");
    const auto head = split(line.substr(0, colon), ' ');
    check(head.size() == 1 || (head.size() == 3 && head[1] == "when"), "'", line.substr(0, colon),
          "' is not a rule, or a rule and 'when float16' or 'when bfloat16'");
    const When when{.dtype = head.size() == 3 ? std::optional(dtype(head[2])) : std::nullopt};
    const auto names = split(std::string_view(line).substr(colon + 1), ',');
    check(!names.empty(), "'", line, "' names no op");
    std::vector<std::string> ops;
    for (const std::string& name : names) {
      if (!name.starts_with("ops::")) {
        ops.push_back(name);
        continue;
      }
      edit(head[0], family(name.substr(5)), when);
    }
    if (!ops.empty()) edit(head[0], ops, when);
  }

  void read_base(const std::string& line) {
    const auto words = split(line, ' ');
    check(words.size() == 2 && words[0] == "policy" &&
              (words[1] == "standard" || words[1] == "torch"),
          "'", line, "' stands where 'policy standard' or 'policy torch' must");
    policy_ = words[1] == "standard" ? Policy::standard() : Policy::torch();
  }

  void edit(const std::string& rule, const OpNames& ops, const When& when) {
    try {
      if (rule == to_string(Cast::lower_precision)) {
        policy_->lower_precision(ops, when);
      } else if (rule == to_string(Cast::fp32)) {
        policy_->fp32(ops, when);
      } else if (rule == to_string(Cast::promote)) {
        policy_->promote(ops, when);
      } else if (rule == to_string(Cast::unchanged)) {
        policy_->unchanged(ops, when);
      } else if (rule == to_string(Cast::native)) {
        policy_->native(ops, when);
      } else {
        check(false, "there is no rule '", rule,
              "'; the rules are lower_precision, fp32, promote, unchanged and native");
      }
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      if (text.starts_with(call)) throw;
      check(false, text);
    }
  }

  const OpFamily& family(const std::string& name) const {
    std::string known;
    for (const OpFamily& family : ops::families) {
      if (family.name() == name) return family;
      known += (known.empty() ? "" : ", ") + std::string(family.name());
    }
    check(false, "there is no family 'ops::", name, "'; the families are ", known);
    return ops::families[0];
  }

  at::ScalarType dtype(const std::string& name) const {
    check(name == "float16" || name == "bfloat16", "'", name, "' is not float16 or bfloat16");
    return name == "float16" ? at::kHalf : at::kBFloat16;
  }

  template <class... Pieces>
  void check(bool holds, const Pieces&... pieces) const {
    TORCH_CHECK(holds, call, ": line ", number_, ": ", pieces...);
  }

  static constexpr std::string_view call = "torchamp::parse_policy";
  int number_ = 1;
  std::optional<Policy> policy_;
};

}  // namespace detail

/// The policy that `text` describes: see to_text(). '#' starts a comment; empty lines are passed
/// over. Errors name the line and what is wrong with it.
inline Policy parse_policy(std::string_view text) {
  return detail::PolicyParser().parse(text);
}

/// The policy in a file of such text.
inline Policy load_policy(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  TORCH_CHECK(file, "torchamp::load_policy: cannot read '", path, "'.");
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
  const bool failed = std::ferror(file) != 0;
  (void)std::fclose(file);
  TORCH_CHECK(!failed, "torchamp::load_policy: cannot read '", path, "'.");
  return parse_policy(text);
}

}  // namespace torchamp
