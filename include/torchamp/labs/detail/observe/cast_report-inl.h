// SPDX-License-Identifier: BSD-3-Clause
// A CastReport as a table and as JSON.
#pragma once

#include <cstdint>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/policy_text/print.h"
#include "torchamp/labs/cast_recorder.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Whether torchamp's own cache of weights was used.
inline bool used_cache(const CastReport::Row& row) {
  return row.cache_hits + row.cache_misses > 0;
}

inline bool used_fp8(const CastReport::Row& row) {
  return row.fp8 != 0 || !row.not_fp8.empty();
}

inline std::string json_numbers(const CastReport::Row& row) {
  std::ostringstream out = classic_stream();
  const auto object = [&](const auto& numbers, const auto& name_of) {
    const char* separator = "{";
    for (const auto& [key, number] : numbers) {
      out << separator << json_string(name_of(key)) << ": " << number;
      separator = ", ";
    }
    out << (numbers.empty() ? "{}" : "}");
  };
  out << "\"calls\": ";
  object(row.calls, dtype_name);
  out << ", \"casts\": " << row.casts << ", \"cast_bytes\": " << row.cast_bytes
      << ", \"undone\": " << row.undone << ", \"fp32_by_input\": " << row.fp32_by_input;
  if (used_cache(row)) {
    out << ", \"cache_hits\": " << row.cache_hits << ", \"cache_misses\": " << row.cache_misses;
  }
  if (used_fp8(row)) {
    out << ", \"fp8\": " << row.fp8 << ", \"not_fp8\": ";
    object(row.not_fp8, [](const std::string& why) { return why; });
  }
  return out.str();
}

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

inline CastReport::Row CastReport::total() const {
  Row sum;
  for (const Row& row : rows_) {
    for (const auto& [dtype, calls] : row.calls) sum.calls[dtype] += calls;
    for (const auto& [why, calls] : row.not_fp8) sum.not_fp8[why] += calls;
    for (int64_t Row::*const number :
         {&Row::casts, &Row::cast_bytes, &Row::undone, &Row::fp32_by_input, &Row::fp8,
          &Row::cache_hits, &Row::cache_misses}) {
      sum.*number += row.*number;
    }
  }
  return sum;
}

inline std::string CastReport::to_json() const {
  std::ostringstream out = detail::classic_stream();
  out << "{\"rows\": [";
  const char* separator = "\n  ";
  for (const Row& row : rows_) {
    out << separator << "{\"phase\": " << (row.backward ? "\"backward\"" : "\"forward\"")
        << ", \"module\": " << detail::json_string(row.module)
        << ", \"op\": " << detail::json_string(row.op) << ", " << detail::json_numbers(row) << '}';
    separator = ",\n  ";
  }
  out << "],\n \"total\": {" << detail::json_numbers(total()) << "}}\n";
  return out.str();
}

inline std::ostream& operator<<(std::ostream& out, const CastReport& report) {
  const CastReport::Row total = report.total();
  const bool fp8 = detail::used_fp8(total), kept = detail::used_cache(total);
  std::vector<std::vector<std::string>> lines{{"phase", "module", "op"}};
  for (const auto& [dtype, calls] : total.calls) lines[0].push_back(detail::dtype_name(dtype));
  for (const char* name : {"casts", "bytes", "undone", "by input"}) lines[0].emplace_back(name);
  if (fp8) lines[0].emplace_back("fp8");
  if (kept) lines[0].emplace_back("kept");
  const auto add = [&](const char* phase, const CastReport::Row& row) {
    std::vector<int64_t> numbers;
    for (const auto& [dtype, calls] : total.calls) {
      const auto found = row.calls.find(dtype);
      numbers.push_back(found == row.calls.end() ? 0 : found->second);
    }
    numbers.insert(numbers.end(), {row.casts, row.cast_bytes, row.undone, row.fp32_by_input});
    if (fp8) numbers.push_back(row.fp8);
    if (kept) numbers.push_back(row.cache_hits);
    auto& line = lines.emplace_back(std::vector<std::string>{phase, row.module, row.op});
    for (const int64_t number : numbers) {
      line.push_back(number == 0 ? "-" : std::to_string(number));
    }
  };
  for (const CastReport::Row& row : report.rows()) add(row.backward ? "backward" : "forward", row);
  add("total", total);
  detail::print_columns(out, lines, 3);
  out << "calls by dtype; casts made for them, with the bytes read and written; undone: casts back "
         "to the\ndtype that an earlier cast left; by input: calls in fp32 only because an input "
         "was fp32\n";
  if (fp8) out << "fp8: calls in fp8\n";
  for (const auto& [why, calls] : total.not_fp8) {
    out << calls << " under the rule fp8 ran as lower_precision: " << why << '\n';
  }
  if (kept) out << "kept: casts of weights that were not made, but found\n";
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
