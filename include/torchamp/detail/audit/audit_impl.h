// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "torchamp/detail/audit/agree.h"
#include "torchamp/detail/audit/audit_session.h"
#include "torchamp/detail/audit/audit_text.h"
#include "torchamp/detail/audit/choose.h"
#include "torchamp/precision_audit.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// What a PrecisionAudit has measured.
struct AuditData {
  AuditedModel audited;
  std::function<void()> step{};
  int64_t n = 0;
  std::vector<AuditRow> rows{};    // in the order of printing
  std::vector<AuditEdge> edges{};  // between them
  bool times_were_read = false;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The distance between the quartiles.
inline double spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() * 3 / 4] - values[values.size() / 4];
}

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

/// Throws for a model that is frozen as a whole or trained in 16 bits, and without gradients.
inline void check_is_trained(const char* call, const torch::nn::Module& model) {
  TORCH_CHECK(at::GradMode::is_enabled(), call,
              ": gradients are off on this thread, by a NoGradGuard or an InferenceMode, and an "
              "audit measures errors by gradients. Call it outside of that.");
  bool is_trained = false;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    is_trained = true;
    TORCH_CHECK(!is_16_bit(parameter.scalar_type()), call, ": the parameter '", item.key(),
                "' is in ", parameter.scalar_type(),
                ", and errors are measured against a step in fp32. Audit the model before "
                "MasterWeights or to() make it narrow, or a copy of it that to(torch::kFloat) has "
                "widened.");
  }
  TORCH_CHECK(is_trained, call,
              ": no parameter of the model needs a gradient, and an audit measures errors by "
              "gradients. Call requires_grad_(true) on those that are trained.");
}

/// Whether a row must stay in fp32 whatever the budget.
inline bool is_harmful(const AuditRow& row, double gradient_loss_limit) {
  return !row.problem.empty() || !std::isfinite(row.error) || row.overflow > 0. ||
         row.gradient_loss > gradient_loss_limit;
}

/// What an audit of one step has measured: rows in order of printing, and the edges between them.
inline void sort_rows(AuditData& data) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < data.rows.size(); ++i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const AuditRow &one = data.rows[a], &other = data.rows[b];
    const double limit = AuditBudget{}.gradient_loss_limit;
    const bool harms = is_harmful(one, limit), other_harms = is_harmful(other, limit);
    if (harms != other_harms) return harms;
    if (one.error != other.error) return one.error > other.error;
    return one.gradient_loss > other.gradient_loss;
  });
  std::vector<std::size_t> place(order.size());
  std::vector<AuditRow> sorted;
  for (std::size_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    sorted.push_back(std::move(data.rows[order[i]]));
  }
  data.rows = std::move(sorted);
  for (AuditEdge& edge : data.edges) {
    if (edge.producer) edge.producer = place[*edge.producer];
    edge.consumer = place[edge.consumer];
  }
}

}  // namespace detail

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
  TORCH_CHECK_VALUE(n >= 1, "PrecisionAudit::run: n is ", n, ". It is 1 or more.");
  constexpr const char* call = "PrecisionAudit::run";
  detail::AuditData data{.audited = data_->audited, .step = step, .n = n};
  detail::check_is_trained(call, *data.audited.model);
  detail::AuditSession session(data.audited, step);
  session.run_exactly();
  data.audited = session.audited();
  std::vector<std::string> calls;
  std::vector<std::vector<AuditRow>> runs;
  std::vector<std::vector<detail::AuditEdge>> edges;
  for (int64_t i = 0; i < n; ++i) {
    const auto recording = session.run_recorded();
    if (i == 0) {
      detail::check_no_problem(call, data.audited, session.problem_of_gradients());
      calls = recording->calls();
    }
    for (std::size_t c = 0; c < std::max(calls.size(), recording->calls().size()); ++c) {
      const auto& now = recording->calls();
      TORCH_CHECK(c < calls.size() && c < now.size() && calls[c] == now[c],
                  "PrecisionAudit::run: the step is not the same each time: run ", i + 1,
                  " calls '", c < now.size() ? now[c] : "nothing",
                  "' (module|op|shapes) where "
                  "the first called '",
                  c < calls.size() ? calls[c] : "nothing", "'. Let it use one batch.");
    }
    runs.push_back(recording->rows());
    edges.push_back(recording->edges());
  }
  TORCH_CHECK(!calls.empty(),
              "PrecisionAudit::run: the step calls no op that can be cast, on the device of the "
              "model's parameters. (Tensors in fp64 are never cast: audit the model in fp32.)");
  data.rows = runs[0];
  for (std::size_t r = 0; r < data.rows.size(); ++r) {
    for (double AuditRow::*const time :
         {&AuditRow::fp32_us, &AuditRow::low_us, &AuditRow::cast_us}) {
      std::vector<double> times;
      times.reserve(runs.size());
      for (const auto& run : runs) times.push_back(run[r].*time);
      data.rows[r].*time = detail::median(std::move(times));
    }
  }
  data.edges = edges[0];
  for (std::size_t e = 0; e < data.edges.size(); ++e) {
    std::vector<double> times;
    times.reserve(edges.size());
    for (const auto& run : edges) times.push_back(run[e].us);
    data.edges[e].us = detail::median(std::move(times));
  }
  detail::agree(data.audited, data.rows, data.edges);
  detail::sort_rows(data);
  *data_ = std::move(data);
}

inline const std::vector<AuditRow>& PrecisionAudit::rows() const {
  return data_->rows;
}

inline AuditRow PrecisionAudit::total() const {
  AuditRow sum;
  double elements = 0.;
  for (const AuditRow& row : data_->rows) {
    const auto count = static_cast<double>(row.elements);
    sum.calls += row.calls;
    sum.elements += row.elements;
    sum.error += row.error;
    sum.gradient_loss = std::max(sum.gradient_loss, row.gradient_loss);
    sum.underflow += row.underflow * count;
    sum.overflow += row.overflow * count;
    sum.vanished += row.vanished * count;
    sum.largest = std::max(sum.largest, row.largest);
    if (row.smallest > 0. && (sum.smallest == 0. || row.smallest < sum.smallest)) {
      sum.smallest = row.smallest;
    }
    sum.fp32_us += row.fp32_us;
    sum.low_us += row.low_us;
    sum.cast_us += row.cast_us;
    elements += count;
  }
  for (double* const share : {&sum.underflow, &sum.overflow, &sum.vanished}) {
    *share /= std::max(elements, 1.);
  }
  return sum;
}

inline std::string PrecisionAudit::to_csv() const {
  return detail::audit_csv(data_->rows);
}

inline void PrecisionAudit::write_csv(const std::string& path) const {
  detail::write_text("PrecisionAudit::write_csv", path, to_csv());
}

inline void PrecisionAudit::read_times(const std::string& path) {
  const std::string call = "PrecisionAudit::read_times";
  auto rows = detail::with_times(data_->rows, detail::read_policy_file(call, path),
                                 call + ": '" + path + "'");
  // A file tells the casts of a row as a whole: its edges share it as they were measured.
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

#include "torchamp/detail/audit/audit_policy.h"  // IWYU pragma: export
