// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/audit_row.h"
#include "torchamp/detail/audit/audit_recording.h"
#include "torchamp/detail/audit/audit_session.h"
#include "torchamp/detail/audit/model_state.h"
#include "torchamp/detail/devices.h"

namespace torchamp::detail {

// Note [Processes that choose alike]
// A choice depends on times, which differ from process to process, and how many choices are tried
// depends on them, too. Where a step waits for other processes, all must try the same ones. So what
// a choice depends on is averaged over the processes as soon as it has been measured.

/// Replaces the numbers by their means over the processes that audit together.
inline void average_numbers(const AuditedModel& audited, const std::vector<double*>& numbers) {
  if (!audited.average || numbers.empty()) return;
  const NotRecordedOps internal;
  const bool lacks_fp64 = facts_of(audited.device.type()).fp64 == Fp64::no;
  at::Tensor values = at::empty({static_cast<int64_t>(numbers.size())}, at::kDouble);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    values.mutable_data_ptr<double>()[i] = *numbers[i];
  }
  at::Tensor averaged = values.to(audited.device, lacks_fp64 ? at::kFloat : at::kDouble);
  audited.average(averaged);
  averaged = averaged.to(at::kCPU, at::kDouble).contiguous();
  TORCH_CHECK(averaged.sizes().equals(values.sizes()), "PrecisionAudit: the option average made ",
              averaged.sizes(), " numbers of ", values.sizes(), ". It must keep the shape.");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    *numbers[i] = averaged.const_data_ptr<double>()[i];
  }
}

/// Throws if there is a problem on any of the processes that audit together: on all of them.
inline void check_no_problem(const char* call, const AuditedModel& audited,
                             const std::string& problem) {
  double problems = problem.empty() ? 0. : 1.;
  average_numbers(audited, {&problems});
  TORCH_CHECK(
      problems == 0., call, ": ",
      problem.empty() ? "another process has a problem with its step, and says which" : problem,
      ".");
}

/// Gives rows and edges, as a step calls them, the means over the processes of what a choice
/// depends on. Error: the rows are others elsewhere.
inline void agree(const AuditedModel& audited, std::vector<AuditRow>& rows,
                  std::vector<AuditEdge>& edges) {
  if (!audited.average) return;
  std::string text;
  for (const AuditRow& row : rows) text += row.module + '|' + row.op + '\n';
  for (const AuditEdge& edge : edges) {
    text += std::to_string(edge.producer.value_or(rows.size())) + '>' +
            std::to_string(edge.consumer) + '\n';
  }
  // 20 bits, so that sums are exact in fp32, too.
  const auto own = static_cast<double>(std::hash<std::string>{}(text)&0xFFFFFU);
  double common = own;
  average_numbers(audited, {&common});
  TORCH_CHECK(own == common,
              "PrecisionAudit: the steps of the processes do not call the same ops. Give all of "
              "them the same model and step.");
  std::vector<double> has_problem;
  has_problem.reserve(rows.size());
  for (const AuditRow& row : rows) has_problem.push_back(row.problem.empty() ? 0. : 1.);
  std::vector<double*> numbers;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    AuditRow& row = rows[i];
    numbers.insert(numbers.end(),
                   {&row.error, &row.gradient_loss, &row.underflow, &row.overflow, &row.vanished,
                    &row.fp32_us, &row.low_us, &row.cast_us, &has_problem[i]});
  }
  for (AuditEdge& edge : edges) numbers.push_back(&edge.us);
  average_numbers(audited, numbers);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (has_problem[i] > 0. && rows[i].problem.empty()) {
      rows[i].problem = "it cannot run in 16 bits on another process";
    }
  }
}

}  // namespace torchamp::detail
