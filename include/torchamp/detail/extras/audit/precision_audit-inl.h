// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/extras/audit/choose.h"
#include "torchamp/detail/extras/audit/session.h"
#include "torchamp/detail/extras/audit/text.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/policy_text/name_pattern.h"
#include "torchamp/detail/extras/policy_text/parse.h"
#include "torchamp/precision_audit.h"

namespace torchamp::detail {

/// The measurements of a PrecisionAudit.
struct AuditData {
  AuditedModel audited;
  std::function<void()> step{};
  int64_t n = 0;
  std::vector<AuditRow> rows{};    // in the order of printing
  std::vector<AuditEdge> edges{};  // between them
  bool times_were_read = false;
};

/// The numbers of rows that add up.
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

/// Throws if the model is frozen as a whole or trained in 16 bits, and if grad mode is off.
inline void check_is_trained(const char* call, const torch::nn::Module& model) {
  TORCH_CHECK(at::GradMode::is_enabled(), call,
              ": grad mode is off on this thread (NoGradGuard, InferenceMode), and an audit "
              "measures errors by gradients. Call it outside that scope.");
  bool is_trained = false;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    is_trained = true;
    TORCH_CHECK(
        !is_16_bit(parameter.scalar_type()), call, ": the parameter '", item.key(), "' is in ",
        parameter.scalar_type(),
        ", and errors are measured against a step in fp32. Audit the model before MasterWeights or "
        "to() casts it to 16 bits, or audit a copy after to(torch::kFloat).");
  }
  TORCH_CHECK(is_trained, call,
              ": no parameter of the model requires grad, and an audit measures errors by "
              "gradients. Call requires_grad_(true) on the trained ones.");
}

/// Whether a row must stay in fp32 whatever the budget.
inline bool is_harmful(const AuditRow& row, double gradient_loss_limit) {
  return !row.problem.empty() || !std::isfinite(row.error) || row.overflow > 0. ||
         row.gradient_loss > gradient_loss_limit;
}

/// Sorts the rows for printing, with their edges.
inline void sort_rows(AuditData& data) {
  std::vector<std::size_t> order(data.rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::size_t i) {
    const AuditRow& row = data.rows[i];
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

/// Turns measurements into policies. Rows of one op in all modules that one policy reaches follow
/// one rule.
class AuditChoice {
 public:
  AuditChoice(const AuditData& data, const ForwardSites& sites, double gradient_loss_limit)
      : data_(data), limit_(gradient_loss_limit) {
    std::map<std::string, std::string> site_names;  // of modules that can be given a policy
    for (const auto& [name, index] : sites.names()) {
      const ForwardSite& site = sites[index];
      if (name.empty() || (site.holder == nullptr && site.entries.empty())) continue;
      site_names.emplace(name, site.name);
    }
    std::map<std::pair<std::string, std::string>, std::size_t> index;
    for (std::size_t r = 0; r < data.rows.size(); ++r) {
      // The innermost one at or around the row's module.
      std::string module = data.rows[r].module;
      while (!module.empty() && !site_names.contains(module)) {
        const auto dot = module.rfind('.');
        module.erase(dot == std::string::npos ? 0 : dot);
      }
      if (!module.empty()) module = site_names[module];
      const auto [found, is_new] = index.try_emplace({module, data.rows[r].op}, units_.size());
      if (is_new) {
        units_.push_back({module, data.rows[r].op, {}});
        units_of_op_[data.rows[r].op].push_back(found->second);
      }
      unit_of_.push_back(found->second);
      units_[found->second].rows.push_back(r);
    }
  }

  Chooser chooser() const {
    std::vector<Choosable> all;
    for (const Unit& unit : units_) {
      Choosable& one = all.emplace_back();
      for (const std::size_t r : unit.rows) {
        const AuditRow& row = data_.rows[r];
        one.fp32_us += row.fp32_us;
        one.low_us += row.low_us;
        one.error += row.error;
        one.may_be_lowered = one.may_be_lowered && !is_harmful(row, limit_);
      }
    }
    std::vector<AuditEdge> edges = data_.edges;
    for (AuditEdge& edge : edges) {
      if (edge.producer) edge.producer = unit_of_[*edge.producer];
      edge.consumer = unit_of_[edge.consumer];
    }
    return {std::move(all), std::move(edges)};
  }

  AuditedPolicy policies(const Chooser::Lowered& lowered) const {
    AuditedPolicy result;
    std::map<std::string, bool> common;  // by op: the guards' rule
    const auto policy = std::make_shared<PolicyData>(BaseTable::torch);
    const auto decide = [&](PolicyData& its, const std::string& module, const std::string& op,
                            bool is_lowered, const std::vector<std::size_t>& units) {
      result.decisions.push_back({module, op, is_lowered, reason(units, is_lowered)});
      add_edit(its, is_lowered ? Cast::lower_precision : Cast::fp32, op, {});
    };
    for (const auto& [op, units] : units_of_op_) {
      std::vector<std::size_t> lowered_ones, others;
      std::optional<bool> of_guards;
      for (const std::size_t u : units) {
        (lowered[u] ? lowered_ones : others).push_back(u);
        if (units_[u].module.empty()) of_guards = lowered[u];
      }
      const bool is_lowered = of_guards.value_or(lowered_ones.size() >= others.size());
      common.emplace(op, is_lowered);
      decide(*policy, "", op, is_lowered, is_lowered ? lowered_ones : others);
    }
    std::map<std::string, std::shared_ptr<PolicyData>> of_modules;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const Unit& unit = units_[u];
      if (unit.module.empty()) {
        std::set<std::string> modules;
        for (const std::size_t r : unit.rows) modules.insert(data_.rows[r].module);
        if (modules.size() > 1) result.joined.push_back(unit.op);
        continue;
      }
      if (lowered[u] == common.at(unit.op)) continue;
      auto& of_module = of_modules[unit.module];
      if (!of_module) of_module = std::make_shared<PolicyData>(*policy);
      decide(*of_module, unit.module, unit.op, lowered[u], {u});
    }
    result.policy = Policy(policy);
    for (const auto& [module, its] : of_modules) {
      result.modules.set(pattern_of(module), Policy(its));
    }
    std::ranges::stable_sort(result.decisions, {}, &AuditDecision::module);
    return result;
  }

 private:
  struct Unit {
    std::string module;  // whose policy it is; empty: that of the guards
    std::string op;
    std::vector<std::size_t> rows;
  };

  std::string reason(const std::vector<std::size_t>& units, bool is_lowered) const {
    AuditRow all;
    for (const std::size_t u : units) {
      for (const std::size_t r : units_[u].rows) {
        const AuditRow& row = data_.rows[r];
        if (!row.problem.empty()) return "cannot run in 16 bits";
        for (const auto number : audit_sums) all.*number += row.*number;
        all.gradient_loss = std::max(all.gradient_loss, row.gradient_loss);
        all.overflow = std::max(all.overflow, row.overflow);
      }
    }
    if (!is_lowered && (all.overflow > 0. || !std::isfinite(all.error))) {
      return number_text(100. * all.overflow, 2) + " % of its results overflow";
    }
    if (!is_lowered && all.gradient_loss > 1.) return "its gradients overflow in 16 bits";
    if (!is_lowered && all.gradient_loss > limit_) {
      return "16 bits lose " + number_text(100. * all.gradient_loss, 2) + " % of its gradients";
    }
    return "error " + number_text(all.error, 2) + ", " + number_text(all.fp32_us, 4) +
           " us in fp32, " + number_text(all.low_us, 4) + " in 16 bits, " +
           number_text(all.cast_us, 4) + " in casts";
  }

  const AuditData& data_;
  double limit_;
  std::vector<Unit> units_;
  std::vector<std::size_t> unit_of_;  // by row
  std::map<std::string, std::vector<std::size_t>> units_of_op_;
};

}  // namespace torchamp::detail

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

inline AuditedPolicy PrecisionAudit::policy(const AuditBudget& budget) const {
  using detail::Chooser;
  constexpr const char* call = "PrecisionAudit::policy";
  TORCH_CHECK(!data_->rows.empty(), call, ": nothing has been measured. Call run(step) first.");
  TORCH_CHECK_VALUE(!budget.error_budget || *budget.error_budget >= 0., call,
                    ": the error budget is ", budget.error_budget.value_or(0.),
                    ". It is 0 or more.");
  TORCH_CHECK_VALUE(budget.gradient_loss_limit >= 0., call, ": the gradient_loss_limit is ",
                    budget.gradient_loss_limit, ". It is 0 or more.");
  detail::check_is_trained(call, *data_->audited.model);
  detail::AuditSession session(data_->audited, data_->step);
  const detail::AuditChoice choice(*data_, session.sites(), budget.gradient_loss_limit);
  const Chooser chooser = choice.chooser();
  session.run_exactly();
  detail::check_no_problem(call, data_->audited, session.problem_of_gradients());
  // Infinite if the step cannot run so: see Note [Recurrent layers].
  double torch_error = std::numeric_limits<double>::infinity();
  bool runs_under_torch = true;
  try {
    torch_error = session.run_under(Policy::torch(), {}).first;
  } catch (const std::exception&) {
    runs_under_torch = false;
  }
  detail::average_numbers(data_->audited, {&torch_error});
  const double most =
      budget.error_budget.value_or(std::min(torch_error, AuditBudget::most_by_default));
  const auto measured = [&](const Chooser::Lowered& lowered) {
    AuditedPolicy tried = choice.policies(lowered);
    tried.error = session.run_under(tried.policy, tried.modules).first;
    detail::average_numbers(data_->audited, {&tried.error});
    return tried;
  };
  const auto keeps_to_it = [&](const AuditedPolicy& tried) {
    return std::isfinite(tried.error) && tried.error <= most;
  };

  std::vector<Chooser::Choice> choices = chooser.choices();
  // Those that save something; last, nothing lowered.
  std::erase_if(choices, [us = choices.back().us](const auto& one) { return one.us > us; });
  // The first within the budget; nothing lowered has no error.
  std::size_t low = 0, high = choices.size() - 1;
  AuditedPolicy best = choice.policies(choices[high].lowered);
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    AuditedPolicy tried = measured(choices[middle].lowered);
    if (keeps_to_it(tried)) {
      high = middle;
      best = std::move(tried);
    } else {
      low = middle + 1;
    }
  }
  const auto extend = [&](Chooser::Lowered& lowered, AuditedPolicy& policy) {
    std::vector<bool> seen(lowered.size(), false);
    for (int tries = 12; tries > 0; --tries) {
      const auto next = chooser.best_to_add(lowered, seen);
      if (!next) return;
      seen[*next] = true;
      Chooser::Lowered more = lowered;
      more[*next] = true;
      AuditedPolicy tried = measured(more);
      if (!keeps_to_it(tried)) continue;
      lowered = std::move(more);
      policy = std::move(tried);
    }
  };
  Chooser::Lowered chosen = choices[high].lowered, other = choices.back().lowered;
  AuditedPolicy of_other = choice.policies(other);
  if (most > 0.) {
    extend(chosen, best);
    extend(other, of_other);
  }
  if (chooser.us(other) < chooser.us(chosen)) best = std::move(of_other);

  std::vector<double> us, torch_us, fp32_us;
  for (int64_t i = 0; i < data_->n; ++i) {  // in turn, so that a busy moment is for all
    us.push_back(session.run_under(best.policy, best.modules).second);
    torch_us.push_back(runs_under_torch ? session.run_under(Policy::torch(), {}).second
                                        : std::numeric_limits<double>::infinity());
    fp32_us.push_back(session.us_exactly());
  }
  best.us = detail::median(us);
  best.torch_us = detail::median(torch_us);
  best.fp32_us = detail::median(fp32_us);
  best.spread_us = std::max({detail::spread(us), detail::spread(fp32_us),
                             runs_under_torch ? detail::spread(torch_us) : 0.});
  detail::average_numbers(data_->audited,
                          {&best.us, &best.torch_us, &best.fp32_us, &best.spread_us});
  if (!data_->times_were_read && std::isfinite(torch_error) && torch_error <= most &&
      best.us > best.torch_us) {
    best = AuditedPolicy{.error = torch_error,
                         .us = best.torch_us,
                         .torch_us = best.torch_us,
                         .fp32_us = best.fp32_us,
                         .spread_us = best.spread_us};
  }
  best.budget = most;
  best.torch_error = torch_error;
  return best;
}

}  // namespace TORCHAMP_NAMESPACE
