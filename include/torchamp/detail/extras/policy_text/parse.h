// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/system.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/policy_text/conditions.h"
#include "torchamp/detail/extras/policy_text/print.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The family that `word` ("ops::norm") stands for; null if there is none of that name.
inline const OpFamily* family_named(std::string_view word) {
  if (!word.starts_with("ops::")) return nullptr;
  for (const OpFamily& family : ops::families) {
    if (family.name() == word.substr(5)) return &family;
  }
  return nullptr;
}

/// The lines of a policy's text after the first, one for each edit; empty if later edits have
/// removed the edit. `call` begins the error texts.
inline std::vector<std::string> lines_of_edits(const char* call, const PolicyData& policy) {
  std::vector<std::string> lines(policy.edits.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const Edit& edit = policy.edits[i];
    if (edit.when.predicate && !applies(policy, i)) continue;
    lines[i] = to_string(edit);
    TORCH_CHECK(!edit.when.predicate, call, ": the rule '", lines[i],
                "' depends on a predicate, which is code and has no text. Make that edit in the "
                "program.");
    for (const std::string& name : edit.names) {
      TORCH_CHECK(family_named(name) == nullptr, call, ": in the rule '", lines[i], "', the op '",
                  name, "' has the name of a family. Name its overloads, as 'lib::op.overload'.");
    }
  }
  return lines;
}

inline constexpr std::string_view white_space = " \t\r\v\f";

/// Without white space at both ends.
inline std::string_view strip(std::string_view text) {
  const auto first = text.find_first_not_of(white_space);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(white_space) - first + 1);
}

/// Takes the first line out of `text`.
inline std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(line.size() + 1, text.size()));
  return line;
}

/// Splits at each of `separators` and strips white space; drops empty pieces.
inline std::vector<std::string> split(std::string_view text, std::string_view separators) {
  std::vector<std::string> pieces;
  while (!text.empty()) {
    const auto end = text.find_first_of(separators);
    const std::string_view piece = strip(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    if (!piece.empty()) pieces.emplace_back(piece);
  }
  return pieces;
}

/// The name in a line "module NAME", with which a module's part of a file begins; nothing of any
/// other line.
inline std::optional<std::string> module_of_line(std::string_view line) {
  const auto words = split(line, white_space);
  if (words.empty() || words[0] != "module" || words.size() > 2) return std::nullopt;
  return words.size() == 2 ? words[1] : std::string();
}

/// The names of some rows, with `between` between them.
template <class Rows, class Name>
std::string names_of(const Rows& rows, Name name, const char* between) {
  std::vector<std::string> names;
  for (const auto& row : rows) names.emplace_back(std::invoke(name, row));
  return c10::Join(between, names);
}

/// The policies of modules, in order, by the names behind "module".
using PoliciesOfModules = std::vector<std::pair<std::string, std::shared_ptr<const PolicyData>>>;

/// Reads a policy's text line by line; every error begins with `where` and names the line.
class PolicyParser {
 public:
  /// `is_environments`: for a text that a variable names, whose fp8 rules are errors and whose
  /// parts for modules are left out.
  explicit PolicyParser(std::string where, bool is_environments = false)
      : where_(std::move(where)), is_environments_(is_environments) {}

  /// Returns the policy for all ops. The part under a line "module NAME" goes to `modules`: edits
  /// for the module, or its own policy. If `modules` is null, such a line is an error.
  std::shared_ptr<const PolicyData> parse(std::string_view text,
                                          PoliciesOfModules* modules = nullptr) {
    policy_ = nullptr;
    modules_.clear();
    std::shared_ptr<const PolicyData> common;
    if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // UTF-8's byte-order mark
    for (number_ = 1; !text.empty(); ++number_) {
      const std::string_view line = take_line(text);
      const std::string_view content = strip(line.substr(0, line.find('#')));
      const auto module =
          modules != nullptr || is_environments_ ? module_of_line(content) : std::nullopt;
      if (module && is_environments_) break;
      if (module) {
        end_part(common, *modules, *module);
      } else if (!content.empty()) {
        read(content);
      }
    }
    if (!common) return finished();
    modules->back().second = finished();
    return common;
  }

 private:
  /// Ends the part before the line "module NAME", and begins the module's part.
  void end_part(std::shared_ptr<const PolicyData>& common, PoliciesOfModules& modules,
                const std::string& module) {
    TORCH_CHECK(policy_, where_, ": there is no policy before the line 'module ", module,
                "'. The text must begin with 'policy standard' or 'policy torch', which holds for "
                "all ops.");
    TORCH_CHECK(!module.empty(), where_, " has a line 'module' without a name.");
    TORCH_CHECK(modules_.insert(module).second, where_, " has two lines 'module ", module,
                "'. Put the edits of both under one of them.");
    (common ? modules.back().second : common) = finished();
    modules.emplace_back(module, nullptr);
    policy_ = std::make_shared<PolicyData>(*common);
    may_begin_anew_ = true;
  }

  std::shared_ptr<const PolicyData> finished() const {
    TORCH_CHECK(policy_, where_,
                ": the text is empty. It must begin with 'policy standard' or 'policy torch'.");
    if (policy_->edits.empty()) return unedited(policy_->base);
    return policy_;
  }

  void read(std::string_view line) {
    const bool begins_anew =
        std::exchange(may_begin_anew_, false) && split(line, white_space)[0] == "policy";
    if (!policy_ || begins_anew) return read_base(line);
    check(!module_of_line(line), "'", shorten(line),
          "' begins the policy of a module, and this call reads a single policy. Read such a file "
          "by torchamp::load_policies, in torchamp/labs/policy_file.h");
    const auto colon = line.find(':');
    if (colon >= line.size() - 1 || line[colon + 1] == ':') {
      check(!line.starts_with("policy"), "'", shorten(line),
            "' is a second line of its kind. A text begins with one, which holds for the modules "
            "in it, too");
      const bool is_like_module = line.substr(1).starts_with("odule");
      check(false, "'", shorten(line), "' is not of the form 'fp32: op, op'",
            is_like_module ? " or 'module NAME'" : "");
    }
    std::string head_text(line.substr(0, colon));
    const std::string fp8 = take_options(head_text);
    const auto head = split(head_text, white_space);
    When when;
    const std::string why = head.empty() ? "names no rule" : read_conditions(head, when);
    check(why.empty(), "'", shorten(line.substr(0, colon)), "' ", why);
    const auto names = split(line.substr(colon + 1), ",");
    check(!names.empty(), "'", shorten(line), "' names no op");
    std::vector<std::string> ops;
    for (const std::string& name : names) {
      if (const OpFamily* family = family_named(name)) {
        edit(head[0], *family, when, fp8);
      } else {
        check_is_no_family(name);
        ops.push_back(name);
      }
    }
    if (!ops.empty()) edit(head[0], ops, when, fp8);
  }

  void read_base(std::string_view line) {
    const auto words = split(line, white_space);
    check(words.size() == 2 && words[0] == "policy" &&
              (words[1] == "standard" || words[1] == "torch"),
          "'", shorten(line), "' stands where 'policy standard' or 'policy torch' must");
    policy_ = std::make_shared<PolicyData>(words[1] == "standard" ? BaseTable::standard
                                                                  : BaseTable::torch);
  }

  /// Removes the brackets after "fp8" from `head`, and returns their contents.
  std::string take_options(std::string& head) const {
    const auto open = head.find('(');
    if (open == std::string::npos) return {};
    const auto close = head.find(')', open);
    check(close != std::string::npos && strip(head.substr(0, open)) == "fp8", "'", shorten(head),
          "' is not of the form 'fp8(option option)'");
    std::string options = head.substr(open + 1, close - open - 1);
    head = head.substr(0, open) + " " + head.substr(close + 1);
    return options;
  }

  void edit(const std::string& rule, const OpNames& ops, const When& when,
            const std::string& fp8_options) {
    const CastRow* const row = row_named(rule);
    if (row == nullptr) {
      check(false, "there is no rule '", shorten(rule), "'; the rules are ",
            names_of(cast_rows, &CastRow::name, ", "));
    }
    const bool is_fp8 = row->cast == Cast::fp8;
    check(!is_fp8 || !is_environments_,
          "an fp8 rule cannot come from the environment. Give it in the program, by fp8() or "
          "load_policy()");
    try {
      add_edit(*policy_, row->cast, ops, when, is_fp8 ? make_fp8_rule(fp8_options) : nullptr);
    } catch (const c10::Error& error) {
      check(false, error.what_without_backtrace());
    }
  }

  /// "ops::name" may also be an op, of a library that is called ops.
  void check_is_no_family(const std::string& name) const {
    if (!name.starts_with("ops::") || !find_ops(name, "", /*missing_ok=*/true).empty()) return;
    check(false, "there is no family '", shorten(name), "'; the families are ",
          names_of(ops::families, &OpFamily::name, ", "));
  }

  template <class... Pieces>
  void check(bool holds, const Pieces&... pieces) const {
    TORCH_CHECK(holds, where_, ": line ", number_, ": ", pieces...);
  }

  std::string where_;
  bool is_environments_;
  int64_t number_ = 1;
  bool may_begin_anew_ = false;         // a module's part
  std::set<std::string> modules_;       // that had a line
  std::shared_ptr<PolicyData> policy_;  // null before the line of its base; edited in place
};

/// The contents of the file. `call` begins the error texts.
inline std::string read_policy_file(const std::string& call, const std::string& path) {
  constexpr std::size_t longest = std::size_t{1} << 20;
  errno = 0;
  std::filebuf file;
  std::string text(longest + 1, '\0');
  bool is_read = file.open(path, std::ios::in | std::ios::binary) != nullptr;
  try {
    if (is_read) {
      const auto size = file.sgetn(text.data(), static_cast<std::streamsize>(text.size()));
      text.resize(static_cast<std::size_t>(size));
    }
  } catch (const std::exception&) {  // of a folder, say
    is_read = false;
  }
  TORCH_CHECK(is_read, call, ": cannot read '", path, "': ", error_text(errno), ".");
  TORCH_CHECK(text.size() <= longest, call, ": '", path, "' is longer than ", longest,
              " bytes, so it is no policy. Pass a text file of a policy.");
  return text;
}

/// A PolicyFileReader.
inline std::shared_ptr<const PolicyData> read_environment_policy(const std::string& call,
                                                                 const std::string& path) {
  return PolicyParser(call + ": '" + path + "'", /*is_environments=*/true)
      .parse(read_policy_file(call, path));
}

}  // namespace TORCHAMP_NAMESPACE::detail
