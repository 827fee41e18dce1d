// SPDX-License-Identifier: BSD-3-Clause
// Processes that audit one model together average their measurements, so that they choose alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/labs/audit_row.h"
#include "torchamp/labs/detail/audit/choose.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The subject of a PrecisionAudit.
struct AuditedModel {
  torch::nn::Module* model;
  at::Device device;
  at::ScalarType dtype;
  bool takes_dtype_of_guard = false;  // of the step's first guard; `dtype` is for steps without
  std::function<void(at::Tensor&)> average{};  // over processes; empty: there is one
};

// Note [Processes that choose alike]
// A choice, and the number of tried choices, depends on times, which differ between processes. If a
// step waits for other processes, all must try the same choices. So all inputs of a choice are
// averaged over the processes as soon as they are measured.

/// Averages the numbers over the processes that audit together.
inline void average_numbers(const AuditedModel& audited, const std::vector<double*>& numbers) {
  if (!audited.average || numbers.empty()) return;
  const NotRecordedOps internal;
  const bool lacks_fp64 = facts_of(audited.device.type()).fp64 == Fp64::no;
  std::vector<double> values;
  values.reserve(numbers.size());
  for (const double* const number : numbers) values.push_back(*number);
  at::Tensor averaged =
      at::tensor(values, at::kDouble).to(audited.device, lacks_fp64 ? at::kFloat : at::kDouble);
  audited.average(averaged);
  averaged = averaged.to(at::kCPU, at::kDouble).contiguous();
  TORCH_CHECK(averaged.dim() == 1 && averaged.numel() == std::ssize(values),
              "PrecisionAudit: the option average made ", averaged.sizes(), " numbers of [",
              values.size(), "]. It must keep the shape.");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    *numbers[i] = averaged.const_data_ptr<double>()[i];
  }
}

/// Throws on all processes that audit together if any has a problem.
inline void check_no_problem(const char* call, const AuditedModel& audited,
                             const std::string& problem) {
  double problems = problem.empty() ? 0. : 1.;
  average_numbers(audited, {&problems});
  TORCH_CHECK(problems == 0., call, ": ",
              problem.empty() ? "the step of another process has failed; see its error" : problem,
              ".");
}

/// Averages, over the processes, the inputs of a choice in rows and edges. Error: the rows differ
/// between processes.
inline void agree(const AuditedModel& audited, std::vector<AuditRow>& rows,
                  std::vector<AuditEdge>& edges) {
  if (!audited.average) return;
  std::string text;
  for (const AuditRow& row : rows) text += row.module + '|' + row.op + '\n';
  for (const AuditEdge& edge : edges) {
    text += std::to_string(edge.producer.value_or(rows.size())) + '>' +
            std::to_string(edge.consumer) + '\n';
  }
  // 20 bits, so that sums are exact even in fp32.
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

}  // namespace TORCHAMP_NAMESPACE::detail
