// SPDX-License-Identifier: BSD-3-Clause
// PrecisionAudit: measures a step, and stores, prints and reads the measurements.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <tuple>
#include <utility>

#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/policy_text/parse.h"
#include "torchamp/detail/extras/shared/stable_order.h"
#include "torchamp/labs/detail/audit/choose.h"
#include "torchamp/labs/detail/audit/measurements.h"
#include "torchamp/labs/detail/audit/processes.h"
#include "torchamp/labs/detail/audit/session.h"
#include "torchamp/labs/detail/audit/text.h"
#include "torchamp/labs/precision_audit.h"

namespace TORCHAMP_NAMESPACE::detail {

inline AuditedModel audited_model(torch::nn::Module& model, const PrecisionAuditOptions& options) {
  const std::optional<at::ScalarType> dtype = options.dtype;
  TORCH_CHECK_VALUE(!dtype || is_16_bit(*dtype), "PrecisionAudit: the dtype is ", *dtype,
                    ". Pass torch::kHalf or torch::kBFloat16.");
  for (const at::Tensor& parameter : model.parameters()) {
    if (!parameter.defined() || !at::autocast::is_autocast_available(parameter.device().type())) {
      continue;
    }
    const at::Device device = parameter.device();
    return {.model = &model,
            .device = device,
            .dtype = dtype.value_or(at::autocast::get_autocast_dtype(device.type())),
            .takes_dtype_of_guard = !dtype,
            .average = options.average};
  }
  TORCH_CHECK_VALUE(false, "PrecisionAudit: the model has no parameter on a device with autocast.");
}

/// Sorts the rows for printing, with their edges.
inline void sort_rows(AuditData& data) {
  const std::vector<std::size_t> order = stable_order(data.rows, [](const AuditRow& row) {
    return std::tuple(!is_harmful(row, AuditBudget{}.gradient_loss_limit), -row.error,
                      -row.gradient_loss);
  });
  std::vector<std::size_t> place(order.size());
  std::vector<AuditRow> sorted;
  for (const std::size_t row : order) {
    place[row] = sorted.size();
    sorted.push_back(std::move(data.rows[row]));
  }
  data.rows = std::move(sorted);
  for (AuditEdge& edge : data.edges) {
    if (edge.producer) edge.producer = place[*edge.producer];
    edge.consumer = place[edge.consumer];
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

inline PrecisionAudit::PrecisionAudit(torch::nn::Module& model,
                                      const PrecisionAuditOptions& options)
    : data_(std::make_shared<detail::AuditData>(
          detail::AuditData{.audited = detail::audited_model(model, options)})) {}

inline PrecisionAudit::PrecisionAudit(const PrecisionAudit& other)
    : data_(std::make_shared<detail::AuditData>(*other.data_)) {}

inline PrecisionAudit& PrecisionAudit::operator=(const PrecisionAudit& other) {
  if (this != &other) *data_ = detail::AuditData(*other.data_);
  return *this;
}

inline void PrecisionAudit::run(const std::function<void()>& step, int64_t n) {
  TORCH_CHECK_VALUE(step, "PrecisionAudit::run: the step is empty.");
  TORCH_CHECK_VALUE(n >= 1, "PrecisionAudit::run: n is ", n, ". It must be 1 or more.");
  constexpr const char* call = "PrecisionAudit::run";
  detail::AuditData data{.audited = data_->audited, .step = step, .n = n};
  detail::check_is_trained(call, *data.audited.model);
  detail::AuditSession session(data.audited, step);
  session.run_exactly();
  data.audited = session.audited();
  std::vector<std::string> calls;
  std::vector<std::vector<AuditRow>> runs;
  std::vector<std::vector<detail::AuditEdge>> edges;
  double lacks_gradients = 0.;
  for (int64_t i = 0; i < n; ++i) {
    const auto recording = session.run_recorded();
    lacks_gradients = recording->lacks_gradients() ? 1. : 0.;
    const std::vector<std::string>& now = recording->calls();
    if (i == 0) {
      detail::check_no_problem(call, data.audited, session.problem_of_gradients());
      calls = now;
    }
    const auto [first, other] = std::ranges::mismatch(calls, now);
    TORCH_CHECK(first == calls.end() && other == now.end(),
                "PrecisionAudit::run: the step is not the same each time: run ", i + 1, " calls '",
                other == now.end() ? "nothing" : *other,
                "' (module|op|shapes) where the first called '",
                first == calls.end() ? "nothing" : *first, "'. Let it use one batch.");
    runs.push_back(recording->rows());
    edges.push_back(recording->edges());
  }
  TORCH_CHECK(!calls.empty(),
              "PrecisionAudit::run: the step calls no op that can be cast, on the device of the "
              "model's parameters. (Tensors in fp64 are never cast: audit the model in fp32.)");
  const auto median_of = [](const auto& all, std::size_t place, auto member) {
    std::vector<double> values;
    values.reserve(all.size());
    for (const auto& of_run : all) values.push_back(of_run[place].*member);
    return detail::median(std::move(values));
  };
  data.rows = runs[0];
  for (std::size_t r = 0; r < data.rows.size(); ++r) {
    for (const auto time : {&AuditRow::fp32_us, &AuditRow::low_us, &AuditRow::cast_us}) {
      data.rows[r].*time = median_of(runs, r, time);
    }
  }
  detail::average_numbers(data.audited, {&lacks_gradients});
  if (lacks_gradients > 0.) {
    const std::vector<double> errors = session.errors_of_all_results();
    for (std::size_t r = 0; r < data.rows.size() && errors.size() == data.rows.size(); ++r) {
      data.rows[r].error = errors[r];
    }
  }
  data.edges = edges[0];
  for (std::size_t e = 0; e < data.edges.size(); ++e) {
    data.edges[e].us = median_of(edges, e, &detail::AuditEdge::us);
  }
  detail::agree(data.audited, data.rows, data.edges);
  detail::sort_rows(data);
  *data_ = std::move(data);
}

inline const std::vector<AuditRow>& PrecisionAudit::rows() const {
  return data_->rows;
}

inline AuditRow PrecisionAudit::total() const {
  static constexpr std::array shares{&AuditRow::underflow, &AuditRow::overflow,
                                     &AuditRow::vanished};
  AuditRow sum;
  for (const AuditRow& row : data_->rows) {
    sum.calls += row.calls;
    sum.elements += row.elements;
    for (const auto number : detail::audit_sums) sum.*number += row.*number;
    for (const auto share : shares) sum.*share += row.*share * static_cast<double>(row.elements);
    sum.gradient_loss = std::max(sum.gradient_loss, row.gradient_loss);
    sum.largest = std::max(sum.largest, row.largest);
    if (row.smallest > 0. && (sum.smallest == 0. || row.smallest < sum.smallest)) {
      sum.smallest = row.smallest;
    }
  }
  for (const auto share : shares) {
    sum.*share /= static_cast<double>(std::max<int64_t>(sum.elements, 1));
  }
  return sum;
}

inline std::string PrecisionAudit::to_csv() const {
  return detail::audit_csv(data_->rows);
}

inline void PrecisionAudit::write_csv(const std::string& path) const {
  detail::replace_file("PrecisionAudit::write_csv", path, to_csv());
}

inline void PrecisionAudit::read_times(const std::string& path) {
  const std::string call = "PrecisionAudit::read_times";
  auto rows = detail::with_times(data_->rows, detail::read_policy_file(call, path),
                                 call + ": '" + path + "'");
  // A file has the casts of a row as a whole: its edges share them in proportion to the
  // measurements.
  std::vector<double> measured(rows.size(), 0.);
  for (const detail::AuditEdge& edge : data_->edges) measured[edge.consumer] += 1.;
  auto edges = data_->edges;
  for (detail::AuditEdge& edge : edges) {
    edge.us = rows[edge.consumer].cast_us / measured[edge.consumer];
  }
  detail::agree(data_->audited, rows, edges);
  data_->rows = std::move(rows);
  data_->edges = std::move(edges);
  data_->times_were_read = true;
}

inline std::ostream& operator<<(std::ostream& out, const PrecisionAudit& audit) {
  detail::print_audit(out, audit.rows(), audit.total());
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
