// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

#include "torchamp/detail/io/archive_file.h"
#include "torchamp/detail/modules/with_policy.h"
#include "torchamp/detail/observe/report.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/name_pattern.h"
#include "torchamp/detail/policy/parse.h"
#include "torchamp/detail/policy/print.h"
#include "torchamp/precision_audit.h"

namespace torchamp::detail {

inline constexpr const char* audit_csv_head =
    "module,op,calls,elements,error,gradient_loss,underflow,overflow,vanished,largest,smallest,"
    "fp32_us,low_us,cast_us,problem";

/// In quotes if necessary.
inline std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '\n' || c == '\r') {
      quoted += ' ';
    } else {
      quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
    }
  }
  return quoted + '"';
}

inline std::string audit_csv(const std::vector<AuditRow>& rows) {
  std::string text = std::string(audit_csv_head) + '\n';
  for (const AuditRow& row : rows) {
    text += csv_field(row.module) + ',' + csv_field(row.op) + ',' + std::to_string(row.calls) +
            ',' + std::to_string(row.elements);
    for (const double number :
         {row.error, row.gradient_loss, row.underflow, row.overflow, row.vanished, row.largest,
          row.smallest, row.fp32_us, row.low_us, row.cast_us}) {
      text += ',' + number_text(number, 17);
    }
    text += ',' + csv_field(row.problem) + '\n';
  }
  return text;
}

inline std::vector<std::string> csv_fields(std::string_view line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quoted && c == '"' && i + 1 < line.size() && line[i + 1] == '"') {
      fields.back() += '"';
      ++i;
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

/// `rows` with the times of a text of audit_csv(). `where` begins error messages.
inline std::vector<AuditRow> with_times(std::vector<AuditRow> rows, std::string_view text,
                                        const std::string& where) {
  std::map<std::pair<std::string, std::string>, std::vector<double>> times;
  for (int64_t number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (number == 1) {
      TORCH_CHECK(line == audit_csv_head, where, ": line 1 is not '", audit_csv_head,
                  "', with which PrecisionAudit::write_csv() begins.");
      continue;
    }
    if (line.empty()) continue;
    const std::vector<std::string> fields = csv_fields(line);
    constexpr std::size_t count = 15, first_time = 11;
    TORCH_CHECK(fields.size() == count, where, ": line ", number, " has ", fields.size(),
                " fields, not ", count, '.');
    std::vector<double> numbers;
    for (std::size_t i = first_time; i < first_time + 3; ++i) {
      const char* const end = fields[i].data() + fields[i].size();
      const auto read = std::from_chars(fields[i].data(), end, numbers.emplace_back());
      TORCH_CHECK(read.ec == std::errc() && read.ptr == end && numbers.back() >= 0. &&
                      std::isfinite(numbers.back()),
                  where, ": line ", number, ": '", fields[i], "' is no time in microseconds.");
    }
    const bool is_new = times.emplace(std::pair(fields[0], fields[1]), numbers).second;
    TORCH_CHECK(is_new, where, ": line ", number, " is the second one for the op '", fields[1],
                "' in the module '", fields[0], "'.");
  }
  for (AuditRow& row : rows) {
    const auto found = times.find({row.module, row.op});
    TORCH_CHECK(found != times.end(), where, ": there is no line for the op '", row.op,
                "' in the module '", row.module, "': it is of another model or another step.");
    row.fp32_us = found->second[0];
    row.low_us = found->second[1];
    row.cast_us = found->second[2];
  }
  TORCH_CHECK(times.size() == rows.size(), where, ": it has ", times.size(), " ops and the audit ",
              rows.size(), ": it is of another model or another step.");
  return rows;
}

inline constexpr const char* audit_legend =
    "error: by how much rounding the results to 16 bits changes the loss, squared and summed over "
    "them\n"
    "grad lost: largest share of the gradients arriving at them, squared, that rounding those "
    "loses\n"
    "underflow, overflow, vanished: results that 16 bits hold with less precision, as inf, as 0\n"
    "smallest, largest: magnitudes of the results in fp32\n"
    "us fp32, us 16 bit: microseconds of a step, forward and backward; us casts: of casting all "
    "arguments\n";

inline void print_audit(std::ostream& out, const std::vector<AuditRow>& rows,
                        const AuditRow& total) {
  if (rows.empty()) {
    out << "PrecisionAudit: nothing has been measured. Call run(step) first.\n";
    return;
  }
  std::vector<std::vector<std::string>> lines{{"error", "grad lost", "underflow", "overflow",
                                               "vanished", "smallest", "largest", "us fp32",
                                               "us 16 bit", "us casts", "op in module"}};
  const auto add = [&](const AuditRow& row, const std::string& where) {
    auto& line = lines.emplace_back(
        std::vector<std::string>{number_text(row.error, 3), number_text(row.gradient_loss, 2)});
    for (const double share : {row.underflow, row.overflow, row.vanished}) {
      line.push_back(fixed_text(100. * share, 2) + '%');
    }
    for (const double size : {row.smallest, row.largest}) line.push_back(number_text(size, 3));
    for (const double us : {row.fp32_us, row.low_us, row.cast_us}) {
      line.push_back(fixed_text(us, 1));
    }
    line.push_back(where);
    if (!row.problem.empty()) {
      line.back() += "  (not in 16 bits: " + row.problem.substr(0, 60) + ')';
    }
  };
  for (const AuditRow& row : rows) {
    add(row, row.op + (row.module.empty() ? "" : " in " + row.module));
  }
  add(total, "total of " + std::to_string(rows.size()) + " rows, " + std::to_string(total.calls) +
                 " calls");
  print_columns(out, lines, 0, lines[0].size() - 1);
  out << audit_legend;
}

/// Replaces a file by a text, as a whole or not at all. `call` begins error messages.
inline void write_text(const char* call, const std::string& path, const std::string& text) {
  AtomicFile file(path, call);
  file.write(text.data(), text.size());
  file.commit();
}

inline Cast rule_of(const AuditDecision& decision) {
  return decision.lowered ? Cast::lower_precision : Cast::fp32;
}

inline std::string text_of(const AuditDecision& decision) {
  std::string reason = decision.reason;  // on one line
  std::replace_if(
      reason.begin(), reason.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return std::string(to_string(rule_of(decision))) + ": " + decision.op + "  # " + reason + '\n';
}

using AuditDecisions = std::map<std::string, const AuditDecision*>;  // of one module, by op

/// `policy` with the decided rules.
inline std::shared_ptr<const PolicyData> with_decisions(const PolicyData& policy,
                                                        const AuditDecisions& decided) {
  auto copy = std::make_shared<PolicyData>(policy);
  for (const auto& [op, decision] : decided) add_edit(*copy, rule_of(*decision), op, {});
  return copy;
}

/// The text of a policy's edits from `first` on, with the reasons of decided ones.
inline std::string text_of_edits(const PolicyData& policy, std::size_t first,
                                 const AuditDecisions& decided) {
  const std::vector<std::string> lines = lines_of_edits("torchamp::save_policy", policy);
  std::string text;
  for (std::size_t i = first; i < lines.size(); ++i) {
    if (lines[i].empty()) continue;
    const Edit& edit = policy.edits[i];
    const auto found = edit.names.size() == 1 ? decided.find(edit.names[0]) : decided.end();
    const bool was_decided =
        found != decided.end() && !edit.when.dtype && edit.cast == rule_of(*found->second);
    text += was_decided ? text_of(*found->second) : lines[i] + '\n';
  }
  return text;
}

inline std::string text_of_base(const PolicyData& policy) {
  return "policy " + std::string(to_string(policy.base)) + '\n';
}

/// For load_policies(): a module's edits beyond `common`; if its policy does not extend `common`,
/// all of it.
inline std::string text_of_module(const PolicyData& policy, const PolicyData& common,
                                  const AuditDecisions& decided) {
  const std::size_t size = common.edits.size();
  const bool goes_on =
      policy.base == common.base &&
      std::equal(
          common.edits.begin(), common.edits.end(), policy.edits.begin(),
          policy.edits.begin() + static_cast<std::ptrdiff_t>(std::min(size, policy.edits.size())),
          [](const Edit& a, const Edit& b) { return is_same(a, b); });
  return goes_on ? text_of_edits(policy, size, decided)
                 : text_of_base(policy) + text_of_edits(policy, 0, decided);
}

}  // namespace torchamp::detail

namespace TORCHAMP_NAMESPACE {

inline void save_policy(const AuditedPolicy& audited, const std::string& path) {
  std::map<std::string, detail::AuditDecisions> decided;  // by module
  for (const AuditDecision& decision : audited.decisions) {
    decided[detail::pattern_of(decision.module)][decision.op] = &decision;
  }
  const detail::AuditDecisions of_all = decided[""];
  decided.erase("");
  auto common = audited.policy.data();
  if (common->base == detail::BaseTable::torch && common->edits.empty()) {
    common = detail::with_decisions(*common, of_all);
  }
  std::string text =
      "# Written by torchamp::save_policy: read it with torchamp::load_policies, or set\n"
      "# TORCHAMP_POLICY=file:PATH for the part about ops.\n# Error of the gradients " +
      detail::number_text(audited.error, 3) + ", of Policy::torch() " +
      detail::number_text(audited.torch_error, 3) + ".\n" + detail::text_of_base(*common) +
      detail::text_of_edits(*common, 0, of_all);
  const auto add_module = [&](const std::string& module, const Policy& policy) {
    TORCH_CHECK_VALUE(!module.empty() && module.find_first_of("# \t\r\n") == std::string::npos,
                      "torchamp::save_policy: a file cannot name the module '", module,
                      "'. Register it under a name without '#' and spaces.");
    text += "module " + module + '\n' +
            detail::text_of_module(*policy.data(), *common, decided[module]);
    decided.erase(module);
  };
  for (const auto& [module, policy] : audited.modules.entries()) add_module(module, policy);
  while (!decided.empty()) {
    const auto& [module, decisions] = *decided.begin();
    add_module(std::string(module), Policy(detail::with_decisions(*common, decisions)));
  }
  detail::write_text("torchamp::save_policy", path, text);
}

inline std::ostream& operator<<(std::ostream& out, const AuditedPolicy& audited) {
  out << "error of the gradients " << detail::number_text(audited.error, 3) << " (budget "
      << detail::number_text(audited.budget, 3) << ", Policy::torch() "
      << detail::number_text(audited.torch_error, 3) << ")\nus a step "
      << detail::fixed_text(audited.us, 1) << " (Policy::torch() "
      << detail::fixed_text(audited.torch_us, 1) << ", fp32 "
      << detail::fixed_text(audited.fp32_us, 1) << "; quartiles up to "
      << detail::fixed_text(audited.spread_us, 1) << " apart)\n";
  if (audited.us > audited.fp32_us + audited.spread_us) {
    out << "fp32 takes less time here: train without a guard\n";
  }
  out << "Policy::torch()" << (audited.decisions.empty() ? ", as it is\n" : ", and on top of it\n");
  std::string module;
  for (const AuditDecision& decision : audited.decisions) {
    if (decision.module != module) {
      module = decision.module;
      out << "in module " << module << ":\n";
    }
    out << "  " << detail::text_of(decision);
  }
  for (const std::string& op : audited.joined) {
    out << op
        << " follows one rule in several modules, which can have no policy of their own (unless"
           " they are declared as torchamp::WithPolicy<...>)\n";
  }
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
