// SPDX-License-Identifier: BSD-3-Clause
// The measurements of an audit: a row for each op of each module, and the casts between them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "torchamp/labs/audit_row.h"
#include "torchamp/labs/detail/audit/choose.h"
#include "torchamp/labs/detail/audit/processes.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The measurements of a PrecisionAudit.
struct AuditData {
  AuditedModel audited;
  std::function<void()> step{};
  int64_t n = 0;
  std::vector<AuditRow> rows{};    // in the order of printing
  std::vector<AuditEdge> edges{};  // between them
  bool times_were_read = false;
};

/// The numbers of a row that are added for totals.
inline constexpr std::array audit_sums{&AuditRow::error, &AuditRow::fp32_us, &AuditRow::low_us,
                                       &AuditRow::cast_us};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The interquartile range.
inline double spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() * 3 / 4] - values[values.size() / 4];
}

/// Whether a row must stay in fp32 for every budget.
inline bool is_harmful(const AuditRow& row, double gradient_loss_limit) {
  return !row.problem.empty() || !std::isfinite(row.error) || row.overflow > 0. ||
         row.gradient_loss > gradient_loss_limit;
}

}  // namespace TORCHAMP_NAMESPACE::detail
