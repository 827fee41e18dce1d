// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/audit/agree.h"
#include "torchamp/detail/audit/audit_impl.h"
#include "torchamp/detail/audit/audit_session.h"
#include "torchamp/detail/audit/audit_text.h"
#include "torchamp/detail/audit/choose.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/edit.h"
#include "torchamp/detail/policy/name_pattern.h"
#include "torchamp/precision_audit.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// Rows that follow one rule: those of one op in the modules that one policy reaches.
struct AuditUnit {
  std::string module;  // whose policy it is; empty: that of the guards
  std::string op;
  std::vector<std::size_t> rows;
};

/// The modules that can be given a policy, by all their names.
class PolicySites {
 public:
  explicit PolicySites(const ForwardSites& sites) {
    for (const auto& [name, index] : sites.names()) {
      if (name.empty() || (sites[index].holder == nullptr && sites[index].entries.empty()))
        continue;
      names_.emplace(name, &sites[index].name);
    }
  }

  /// The innermost one at or around the module `name`; empty if there is none.
  std::string around(std::string name) const {
    while (!name.empty()) {
      const auto found = names_.find(name);
      if (found != names_.end()) return *found->second;
      const auto dot = name.rfind('.');
      name = dot == std::string::npos ? std::string() : name.substr(0, dot);
    }
    return name;
  }

 private:
  std::map<std::string, const std::string*> names_;
};

/// From what was measured to policies.
class AuditChoice {
 public:
  AuditChoice(const AuditData& data, const ForwardSites& sites, double gradient_loss_limit)
      : data_(data), limit_(gradient_loss_limit) {
    const PolicySites policy_sites(sites);
    unit_of_.resize(data.rows.size());
    std::map<std::pair<std::string, std::string>, std::size_t> index;
    for (std::size_t r = 0; r < data.rows.size(); ++r) {
      const std::string site = policy_sites.around(data.rows[r].module);
      const auto [found, is_new] = index.try_emplace({site, data.rows[r].op}, units_.size());
      if (is_new) {
        units_.push_back({site, data.rows[r].op, {}});
        units_of_op_[data.rows[r].op].push_back(found->second);
      }
      unit_of_[r] = found->second;
      units_[found->second].rows.push_back(r);
    }
  }

  Chooser chooser() const {
    std::vector<Choosable> all;
    for (const AuditUnit& unit : units_) {
      Choosable one;
      for (const std::size_t r : unit.rows) {
        const AuditRow& row = data_.rows[r];
        one.fp32_us += row.fp32_us;
        one.low_us += row.low_us;
        one.error += row.error;
        one.may_be_lowered = one.may_be_lowered && !is_harmful(row, limit_);
      }
      all.push_back(one);
    }
    std::vector<ChoosableEdge> edges;
    for (const AuditEdge& edge : data_.edges) {
      edges.push_back({edge.producer ? std::optional(unit_of_[*edge.producer]) : std::nullopt,
                       unit_of_[edge.consumer], edge.us});
    }
    return {std::move(all), std::move(edges)};
  }

  /// Policies under which what is `lowered` is.
  AuditedPolicy policies(const Chooser::Lowered& lowered) const {
    AuditedPolicy result;
    std::map<std::string, bool> common;  // by op: the guards' rule
    const auto policy = std::make_shared<PolicyData>(BaseTable::torch);
    for (const auto& [op, units] : units_of_op_) {
      std::size_t votes = 0;
      std::optional<bool> of_guards;
      for (const std::size_t u : units) {
        votes += lowered[u] ? 1 : 0;
        if (units_[u].module.empty()) of_guards = lowered[u];
      }
      const bool is_lowered = of_guards.value_or(2 * votes >= units.size());
      common.emplace(op, is_lowered);
      add_edit(*policy, rule(is_lowered), op, {});
      result.decisions.push_back({"", op, is_lowered, reason(units, is_lowered, lowered)});
    }
    std::map<std::string, std::shared_ptr<PolicyData>> of_modules;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const AuditUnit& unit = units_[u];
      if (unit.module.empty()) {
        std::set<std::string> modules;
        for (const std::size_t r : unit.rows) modules.insert(data_.rows[r].module);
        if (modules.size() > 1) result.joined.push_back(unit.op);
        continue;
      }
      if (lowered[u] == common.at(unit.op)) continue;
      auto& of_module = of_modules[unit.module];
      if (!of_module) of_module = std::make_shared<PolicyData>(*policy);
      add_edit(*of_module, rule(lowered[u]), unit.op, {});
      result.decisions.push_back({unit.module, unit.op, lowered[u], reason_of({u}, lowered[u])});
    }
    result.policy = Policy(policy);
    for (const auto& [module, its] : of_modules)
      result.modules.set(pattern_of(module), Policy(its));
    std::stable_sort(result.decisions.begin(), result.decisions.end(),
                     [](const auto& a, const auto& b) { return a.module < b.module; });
    return result;
  }

 private:
  static Cast rule(bool is_lowered) { return is_lowered ? Cast::lower_precision : Cast::fp32; }

  std::string reason(std::vector<std::size_t> units, bool is_lowered,
                     const Chooser::Lowered& lowered) const {
    std::erase_if(units, [&](std::size_t u) { return lowered[u] != is_lowered; });
    return reason_of(units, is_lowered);
  }

  std::string reason_of(const std::vector<std::size_t>& units, bool is_lowered) const {
    double error = 0., fp32_us = 0., low_us = 0., cast_us = 0., lost = 0., overflow = 0.;
    for (const std::size_t u : units) {
      for (const std::size_t r : units_[u].rows) {
        const AuditRow& row = data_.rows[r];
        if (!row.problem.empty()) return "cannot run in 16 bits";
        error += row.error;
        fp32_us += row.fp32_us;
        low_us += row.low_us;
        cast_us += row.cast_us;
        lost = std::max(lost, row.gradient_loss);
        overflow = std::max(overflow, row.overflow);
      }
    }
    if (!is_lowered && (overflow > 0. || !std::isfinite(error))) {
      return number_text(100. * overflow, 2) + " % of its results overflow";
    }
    if (!is_lowered && lost > 1.) return "its gradients overflow in 16 bits";
    if (!is_lowered && lost > limit_) {
      return "16 bits lose " + number_text(100. * lost, 2) + " % of its gradients";
    }
    return "error " + number_text(error, 2) + ", " + number_text(fp32_us, 4) + " us in fp32, " +
           number_text(low_us, 4) + " in 16 bits, " + number_text(cast_us, 4) + " in casts";
  }

  const AuditData& data_;
  double limit_;
  std::vector<AuditUnit> units_;
  std::vector<std::size_t> unit_of_;  // by row
  std::map<std::string, std::vector<std::size_t>> units_of_op_;
};

}  // namespace detail

inline AuditedPolicy PrecisionAudit::policy(const AuditBudget& budget) const {
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
  const detail::Chooser chooser = choice.chooser();
  session.run_exactly();
  detail::check_no_problem(call, data_->audited, session.problem_of_gradients());
  const auto error_under = [&](const Policy& policy, const ModulePolicies& modules) {
    double error = session.run_under(policy, modules).first;
    detail::average_numbers(data_->audited, {&error});
    return error;
  };
  // Infinite where the step cannot run so: see Note [Recurrent layers].
  double torch_error = std::numeric_limits<double>::infinity();
  bool runs_under_torch = true;
  try {
    torch_error = session.run_under(Policy::torch(), {}).first;
  } catch (const std::exception&) {
    runs_under_torch = false;
  }
  detail::average_numbers(data_->audited, {&torch_error});
  constexpr double any_finite_error = 1.;  // see gradient_error()
  const double most =
      budget.error_budget.value_or(std::isfinite(torch_error) ? torch_error : any_finite_error);
  const auto keeps_to_it = [&](const AuditedPolicy& tried) {
    return std::isfinite(tried.error) && tried.error <= most;
  };

  const detail::Chooser::Choices all = chooser.choices();
  std::vector<std::size_t> choices;  // in `all`, those that save something, and nothing lowered
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all.us(i) <= all.us(all.size() - 1)) choices.push_back(i);
  }
  using Lowered = detail::Chooser::Lowered;
  const auto measured = [&](const Lowered& lowered) {
    AuditedPolicy tried = choice.policies(lowered);
    tried.error = error_under(tried.policy, tried.modules);
    return tried;
  };
  // The first that keeps to the budget; nothing lowered, the last, has no error.
  std::size_t low = 0, high = choices.size() - 1;
  AuditedPolicy best = choice.policies(all[choices[high]]);
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    AuditedPolicy tried = measured(all[choices[middle]]);
    if (keeps_to_it(tried)) {
      high = middle;
      best = std::move(tried);
    } else {
      low = middle + 1;
    }
  }
  const auto extend = [&](Lowered& lowered, AuditedPolicy& policy) {
    std::vector<bool> seen(lowered.size(), false);
    for (int tries = 12; tries > 0; --tries) {
      const auto next = chooser.best_to_add(lowered, seen);
      if (!next) return;
      seen[*next] = true;
      Lowered more = lowered;
      more[*next] = true;
      AuditedPolicy tried = measured(more);
      if (!keeps_to_it(tried)) continue;
      lowered = std::move(more);
      policy = std::move(tried);
    }
  };
  Lowered chosen = all[choices[high]], other = all[choices.back()];
  AuditedPolicy of_other = choice.policies(other);
  if (most > 0.) {
    extend(chosen, best);
    extend(other, of_other);
  }
  if (chooser.us(other) < chooser.us(chosen)) best = std::move(of_other);

  std::vector<double> us, torch_us, fp32_us;
  for (int64_t i = 0; i < data_->n; ++i) {  // in turn, so that a busy moment is for all
    us.push_back(session.run_under(best.policy, best.modules).second);
    torch_us.push_back(runs_under_torch ? session.run_under(Policy::torch(), {}).second : 0.);
    fp32_us.push_back(session.us_exactly());
  }
  best.us = detail::median(us);
  best.torch_us =
      runs_under_torch ? detail::median(torch_us) : std::numeric_limits<double>::infinity();
  best.fp32_us = detail::median(fp32_us);
  best.spread_us =
      std::max({detail::spread(us), detail::spread(torch_us), detail::spread(fp32_us)});
  detail::average_numbers(data_->audited,
                          {&best.us, &best.torch_us, &best.fp32_us, &best.spread_us});
  if (!data_->times_were_read && std::isfinite(torch_error) && torch_error <= most &&
      best.us > best.torch_us) {
    AuditedPolicy torchs{.error = torch_error, .us = best.torch_us};
    torchs.torch_us = best.torch_us;
    torchs.fp32_us = best.fp32_us;
    torchs.spread_us = best.spread_us;
    best = std::move(torchs);
  }
  best.budget = most;
  best.torch_error = torch_error;
  return best;
}

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/audit/saved_policy.h"  // IWYU pragma: export
