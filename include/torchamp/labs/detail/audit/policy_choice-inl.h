// SPDX-License-Identifier: BSD-3-Clause
// PrecisionAudit::policy(): which rows one rule reaches, and the search for the fastest policy
// whose measured error is within the budget.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/shared/stable_order.h"
#include "torchamp/labs/detail/audit/choose.h"
#include "torchamp/labs/detail/audit/measurements.h"
#include "torchamp/labs/detail/audit/processes.h"
#include "torchamp/labs/detail/audit/session.h"
#include "torchamp/labs/detail/modules/name_pattern.h"
#include "torchamp/labs/detail/modules/sequential.h"
#include "torchamp/labs/precision_audit.h"

namespace TORCHAMP_NAMESPACE::detail {

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
    sort_in_stable_order(result.decisions, [](const AuditDecision& one) { return one.module; });
    return result;
  }

 private:
  struct Unit {
    std::string module;  // the module with the policy; empty: the guards' policy
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

/// Measures the step under choices of a Chooser: see Note [How an audit chooses].
class PolicySearch {
 public:
  /// `call` begins error messages. The data must outlive this.
  PolicySearch(const char* call, const AuditData& data, const AuditBudget& budget)
      : data_(data),
        session_(data.audited, data.step),
        choice_(data, session_.sites(), budget.gradient_loss_limit),
        chooser_(choice_.chooser()) {
    session_.run_exactly();
    check_no_problem(call, data.audited, session_.problem_of_gradients());
    run_under_torch();
    most_ = budget.error_budget.value_or(std::min(torch_error_, AuditBudget::most_by_default));
  }

  AuditedPolicy run() {
    std::vector<Chooser::Choice> choices = chooser_.choices();
    // Choices that save something. In the last choice, nothing is lowered.
    std::erase_if(choices, [us = choices.back().us](const auto& one) { return one.us > us; });
    Candidate best = first_within_budget(choices);
    Candidate other = unmeasured(choices.back());
    if (most_ > 0.) {
      extend(best);
      extend(other);
    }
    if (chooser_.us(other.lowered) < chooser_.us(best.lowered)) best = std::move(other);
    AuditedPolicy result = std::move(best.policy);
    measure_times(result);
    if (is_torch_better_than(result)) {
      result = AuditedPolicy{.error = torch_error_,
                             .us = result.torch_us,
                             .torch_us = result.torch_us,
                             .fp32_us = result.fp32_us,
                             .spread_us = result.spread_us};
    }
    result.budget = most_;
    result.torch_error = torch_error_;
    return result;
  }

 private:
  struct Candidate {
    Chooser::Lowered lowered;
    AuditedPolicy policy;
  };

  void run_under_torch() {
    try {
      torch_error_ = session_.run_under(Policy::torch(), {}).first;
      runs_under_torch_ = true;
    } catch (const std::exception&) {  // see Note [Recurrent layers]
      torch_error_ = infinity;
    }
    average_numbers(data_.audited, {&torch_error_});
  }

  Candidate unmeasured(const Chooser::Choice& choice) const {
    return {choice.lowered, choice_.policies(choice.lowered)};
  }

  Candidate measured(Chooser::Lowered lowered) {
    AuditedPolicy tried = choice_.policies(lowered);
    tried.error = session_.run_under(tried.policy, tried.modules).first;
    average_numbers(data_.audited, {&tried.error});
    return {std::move(lowered), std::move(tried)};
  }

  bool is_within_budget(const AuditedPolicy& tried) const {
    return std::isfinite(tried.error) && tried.error <= most_;
  }

  /// By bisection. The last choice is within the budget, because nothing is lowered.
  Candidate first_within_budget(const std::vector<Chooser::Choice>& choices) {
    std::size_t low = 0, high = choices.size() - 1;
    Candidate best = unmeasured(choices[high]);
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      Candidate tried = measured(choices[middle].lowered);
      if (is_within_budget(tried.policy)) {
        high = middle;
        best = std::move(tried);
      } else {
        low = middle + 1;
      }
    }
    return best;
  }

  /// Lowers further ops, in the order of saved time, as long as the whole is within the budget.
  void extend(Candidate& best) {
    std::vector<bool> seen(best.lowered.size(), false);
    for (int tries = 12; tries > 0; --tries) {
      const auto next = chooser_.best_to_add(best.lowered, seen);
      if (!next) return;
      seen[*next] = true;
      Chooser::Lowered more = best.lowered;
      more[*next] = true;
      Candidate tried = measured(std::move(more));
      if (is_within_budget(tried.policy)) best = std::move(tried);
    }
  }

  void measure_times(AuditedPolicy& policy) {
    std::vector<double> us, torch_us, fp32_us;
    for (int64_t i = 0; i < data_.n; ++i) {  // in turn, so that a busy moment affects all
      us.push_back(session_.run_under(policy.policy, policy.modules).second);
      torch_us.push_back(runs_under_torch_ ? session_.run_under(Policy::torch(), {}).second
                                           : infinity);
      fp32_us.push_back(session_.us_exactly());
    }
    policy.us = median(us);
    policy.torch_us = median(torch_us);
    policy.fp32_us = median(fp32_us);
    policy.spread_us =
        std::max({spread(us), spread(fp32_us), runs_under_torch_ ? spread(torch_us) : 0.});
    average_numbers(data_.audited,
                    {&policy.us, &policy.torch_us, &policy.fp32_us, &policy.spread_us});
  }

  /// Whether Policy::torch() is within the budget, and was measured here to be faster.
  bool is_torch_better_than(const AuditedPolicy& policy) const {
    return !data_.times_were_read && std::isfinite(torch_error_) && torch_error_ <= most_ &&
           policy.us > policy.torch_us;
  }

  static constexpr double infinity = std::numeric_limits<double>::infinity();

  const AuditData& data_;
  AuditSession session_;
  AuditChoice choice_;
  Chooser chooser_;
  double torch_error_ = infinity;  // infinite if the step cannot run under Policy::torch()
  bool runs_under_torch_ = false;
  double most_ = 0.;  // error that the budget allows
};

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

inline AuditedPolicy PrecisionAudit::policy(const AuditBudget& budget) const {
  constexpr const char* call = "PrecisionAudit::policy";
  TORCH_CHECK(!data_->rows.empty(), call, ": nothing has been measured. Call run(step) first.");
  TORCH_CHECK_VALUE(!budget.error_budget || *budget.error_budget >= 0., call,
                    ": the error budget is ", budget.error_budget.value_or(0.),
                    ". It must be 0 or more.");
  TORCH_CHECK_VALUE(budget.gradient_loss_limit >= 0., call, ": the gradient_loss_limit is ",
                    budget.gradient_loss_limit, ". It must be 0 or more.");
  detail::check_is_trained(call, *data_->audited.model);
  return detail::PolicySearch(call, *data_, budget).run();
}

}  // namespace TORCHAMP_NAMESPACE
