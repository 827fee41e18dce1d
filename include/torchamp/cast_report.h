// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/observe/print_report.h"

namespace torchamp {

/// What a CastRecorder counted. A value. operator<< prints it as a table.
class CastReport {
 public:
  /// What is said of one op in one module, forward or backward.
  struct Row {
    bool backward = false;
    /// Dotted name, or empty where no module is known.
    std::string module;
    /// With its overload, as a Policy takes it: "add.Tensor". A cast that the program asks for
    /// itself is a row of its own, "to.dtype"; the backward of a cast is "ToCopyBackward0".
    std::string op;
    /// Calls by the program, by the dtype of their (first floating-point) result.
    std::map<at::ScalarType, std::int64_t> calls;
    /// Conversions between floating-point dtypes that autocast made for these calls.
    std::int64_t casts = 0;
    /// Bytes that they read and wrote: elements times the widths of both dtypes.
    std::int64_t cast_bytes = 0;
    /// How many of the casts took values back to the dtype that an earlier cast took them from: of
    /// the earlier cast's result, or of what was computed from it by the op that it was made for
    /// (if that widened them to fp32) and by ops without a rule of their own.
    std::int64_t undone = 0;
    /// How many of the calls ran in fp32 only because an input was fp32 while another had 16 bits:
    /// by type promotion, and not by a rule.
    std::int64_t fp32_by_input = 0;
  };

  explicit CastReport(std::vector<Row> rows) : rows_(std::move(rows)) {
    std::stable_sort(rows_.begin(), rows_.end(),
                     [](const Row& a, const Row& b) { return a.cast_bytes > b.cast_bytes; });
  }

  /// By op, module and phase; those whose casts moved most bytes come first.
  const std::vector<Row>& rows() const { return rows_; }

  /// The sums over all rows.
  Row total() const {
    Row sum;
    for (const Row& row : rows_) {
      for (const auto& [dtype, calls] : row.calls) sum.calls[dtype] += calls;
      sum.casts += row.casts;
      sum.cast_bytes += row.cast_bytes;
      sum.undone += row.undone;
      sum.fp32_by_input += row.fp32_by_input;
    }
    return sum;
  }

  /// An object with "rows" (phase, module, op and the numbers of a Row, by the names of its
  /// members) and "total".
  std::string to_json() const { return detail::to_json(rows_, total()); }

 private:
  std::vector<Row> rows_;
};

inline std::ostream& operator<<(std::ostream& out, const CastReport& report) {
  detail::print_cast_report(out, report.rows(), report.total());
  return out;
}

}  // namespace torchamp
