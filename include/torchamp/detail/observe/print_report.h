// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <locale>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

// Numbers in reports and files are the same whatever locale the program has set, of C or of C++.

/// A stream with the classic locale.
inline std::ostringstream classic_stream() {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  return out;
}

/// `value` as printf's %g has it in the C locale, with so many digits; `fixed`: as its %f.
inline std::string number_text(double value, int digits = 6,
                               std::chars_format format = std::chars_format::general) {
  char text[384];  // the largest double has 309 digits before the point
  const auto written = std::to_chars(text, text + sizeof text, value, format, digits);
  return {text, written.ptr};
}
inline std::string fixed_text(double value, int digits) {
  return number_text(value, digits, std::chars_format::fixed);
}

/// As Python calls it: "float16".
inline std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

/// `text` as a JSON string.
inline std::string json_string(std::string_view text) {
  std::ostringstream out = classic_stream();
  out << '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out << "\\u" << std::hex << std::setw(4) << std::setfill('0') << static_cast<int>(c)
          << std::dec;
    } else {
      out << c;
    }
  }
  out << '"';
  return out.str();
}

/// Whether torchamp's own cache of weights was asked.
template <class Row>
bool used_cache(const Row& row) {
  return row.cache_hits + row.cache_misses > 0;
}

template <class Row>
std::string json_numbers(const Row& row) {
  std::ostringstream out = classic_stream();
  out << "\"calls\": {";
  const char* separator = "";
  for (const auto& [dtype, calls] : row.calls) {
    out << separator << json_string(dtype_name(dtype)) << ": " << calls;
    separator = ", ";
  }
  out << "}, \"casts\": " << row.casts << ", \"cast_bytes\": " << row.cast_bytes
      << ", \"undone\": " << row.undone << ", \"fp32_by_input\": " << row.fp32_by_input;
  if (used_cache(row)) {
    out << ", \"cache_hits\": " << row.cache_hits << ", \"cache_misses\": " << row.cache_misses;
  }
  if (row.fp8 == 0 && row.not_fp8.empty()) return out.str();
  out << ", \"fp8\": " << row.fp8 << ", \"not_fp8\": {";
  separator = "";
  for (const auto& [why, calls] : row.not_fp8) {
    out << separator << json_string(why) << ": " << calls;
    separator = ", ";
  }
  out << '}';
  return out.str();
}

template <class Row>
std::string to_json(const std::vector<Row>& rows, const Row& total) {
  std::ostringstream out = classic_stream();
  out << "{\"rows\": [";
  const char* separator = "\n  ";
  for (const Row& row : rows) {
    out << separator << "{\"phase\": " << (row.backward ? "\"backward\"" : "\"forward\"")
        << ", \"module\": " << json_string(row.module) << ", \"op\": " << json_string(row.op)
        << ", " << json_numbers(row) << '}';
    separator = ",\n  ";
  }
  out << "],\n \"total\": {" << json_numbers(total) << "}}\n";
  return out.str();
}

/// Cells of text in aligned columns, the first of them to the left.
inline void print_columns(std::ostream& out, const std::vector<std::vector<std::string>>& lines,
                          std::size_t to_the_left = 3) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  for (const auto& line : lines) {
    std::string text;
    for (std::size_t i = 0; i < line.size(); ++i) {
      const std::string space(widths[i] - line[i].size(), ' ');
      text += (i == 0 ? "" : "  ") + (i < to_the_left ? line[i] + space : space + line[i]);
    }
    out << text << '\n';
  }
}

template <class Row>
void print_cast_report(std::ostream& out, const std::vector<Row>& rows, const Row& total) {
  std::vector<std::vector<std::string>> lines{{"phase", "module", "op"}};
  for (const auto& [dtype, calls] : total.calls) lines[0].push_back(dtype_name(dtype));
  for (const char* name : {"casts", "bytes", "undone", "by input"}) lines[0].push_back(name);
  const bool fp8 = total.fp8 != 0 || !total.not_fp8.empty();
  if (fp8) lines[0].emplace_back("fp8");
  if (used_cache(total)) lines[0].emplace_back("kept");
  const auto add = [&](std::string phase, const Row& row) {
    std::vector<std::string> line{std::move(phase), row.module, row.op};
    const auto add_number = [&](int64_t number) {
      line.push_back(number == 0 ? "-" : std::to_string(number));
    };
    for (const auto& [dtype, calls] : total.calls) {
      const auto found = row.calls.find(dtype);
      add_number(found == row.calls.end() ? 0 : found->second);
    }
    for (const auto number : {row.casts, row.cast_bytes, row.undone, row.fp32_by_input}) {
      add_number(number);
    }
    if (fp8) add_number(row.fp8);
    if (used_cache(total)) add_number(row.cache_hits);
    lines.push_back(std::move(line));
  };
  for (const Row& row : rows) add(row.backward ? "backward" : "forward", row);
  add("total", total);
  print_columns(out, lines);
  out << "calls by dtype; casts made for them, with the bytes read and written; undone: casts back "
         "to the\ndtype that an earlier cast left; by input: calls in fp32 only because an input "
         "was fp32\n";
  if (fp8) out << "fp8: calls in fp8\n";
  for (const auto& [why, calls] : total.not_fp8) {
    out << calls << " under the rule fp8 ran as lower_precision: " << why << '\n';
  }
  if (used_cache(total)) out << "kept: casts of weights that were not made, but found\n";
}

}  // namespace torchamp::detail
