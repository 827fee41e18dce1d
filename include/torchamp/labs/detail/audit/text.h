// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iomanip>
#include <locale>
#include <map>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/io/archive_file.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/policy_text/parse.h"
#include "torchamp/labs/audit_row.h"

namespace TORCHAMP_NAMESPACE::detail {

inline constexpr const char* audit_csv_head =
    "module,op,calls,elements,error,gradient_loss,underflow,overflow,vanished,largest,smallest,"
    "fp32_us,low_us,cast_us,problem";

/// With spaces for line ends.
inline std::string on_one_line(std::string text) {
  std::ranges::replace_if(
      text, [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text;
}

/// In quotes if necessary.
inline std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::ostringstream quoted;
  quoted << std::quoted(on_one_line(text), '"', '"');
  return quoted.str();
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
    std::string_view line = take_line(text);
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
      std::istringstream field(fields[i]);
      field.imbue(std::locale::classic());
      field >> std::noskipws >> numbers.emplace_back();
      TORCH_CHECK(field && field.eof() && numbers.back() >= 0. && std::isfinite(numbers.back()),
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

}  // namespace TORCHAMP_NAMESPACE::detail
