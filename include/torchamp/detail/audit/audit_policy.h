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
#include "torchamp/precision_audit.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// Rows that follow one rule: those of one op in the modules that one policy reaches.
struct AuditUnit {
  std::string module;  // whose policy it is; empty: that of the guards
  std::string op;
  std::vector<std::size_t> rows;
};

/// The innermost module at or around `name` that can be given a policy; empty if there is none.
inline std::string policy_site(const ForwardSites& sites, std::string name) {
  while (!name.empty()) {
    for (const auto& [known, index] : sites.names()) {
      if (known == name && (sites[index].holder != nullptr || !sites[index].entries.empty())) {
        return sites[index].name;
      }
    }
    const auto dot = name.rfind('.');
    name = dot == std::string::npos ? std::string() : name.substr(0, dot);
  }
  return name;
}

/// From what was measured to policies.
class AuditChoice {
 public:
  AuditChoice(const AuditData& data, const ForwardSites& sites, double gradient_loss_limit)
      : data_(data), limit_(gradient_loss_limit) {
    unit_of_.resize(data.rows.size());
    std::map<std::pair<std::string, std::string>, std::size_t> index;
    for (std::size_t r = 0; r < data.rows.size(); ++r) {
      const std::string site = policy_site(sites, data.rows[r].module);
      const auto [found, is_new] = index.try_emplace({site, data.rows[r].op}, units_.size());
      if (is_new) units_.push_back({site, data.rows[r].op, {}});
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
    std::map<std::string, std::pair<int, int>> votes;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (units_[u].module.empty()) common[units_[u].op] = lowered[u];
      auto& [yes, all] = votes[units_[u].op];
      yes += lowered[u] ? 1 : 0;
      ++all;
    }
    for (const auto& [op, vote] : votes) common.try_emplace(op, 2 * vote.first >= vote.second);
    for (const auto& [op, is_lowered] : common) {
      result.policy.set(is_lowered ? Cast::lower_precision : Cast::fp32, op);
      result.decisions.push_back({"", op, is_lowered, reason(op, is_lowered, lowered)});
    }
    std::map<std::string, Policy> of_modules;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const AuditUnit& unit = units_[u];
      if (unit.module.empty()) {
        std::set<std::string> modules;
        for (const std::size_t r : unit.rows) modules.insert(data_.rows[r].module);
        if (modules.size() > 1) result.joined.push_back(unit.op);
        continue;
      }
      if (lowered[u] == common.at(unit.op)) continue;
      auto& policy = of_modules.try_emplace(unit.module, result.policy).first->second;
      policy.set(lowered[u] ? Cast::lower_precision : Cast::fp32, unit.op);
      result.decisions.push_back({unit.module, unit.op, lowered[u], reason_of({u}, lowered[u])});
    }
    for (const auto& [module, policy] : of_modules) result.modules.set(module, policy);
    std::stable_sort(result.decisions.begin(), result.decisions.end(),
                     [](const auto& a, const auto& b) { return a.module < b.module; });
    return result;
  }

 private:
  std::string reason(const std::string& op, bool is_lowered,
                     const Chooser::Lowered& lowered) const {
    std::vector<std::size_t> units;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (units_[u].op == op && lowered[u] == is_lowered) units.push_back(u);
    }
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
      return formatted("%.2g", 100. * overflow) + " % of its results overflow";
    }
    if (!is_lowered && lost > 1.) return "its gradients overflow in 16 bits";
    if (!is_lowered && lost > limit_) {
      return "16 bits lose " + formatted("%.2g", 100. * lost) + " % of its gradients";
    }
    return "error " + formatted("%.2g", error) + ", " + formatted("%.4g", fp32_us) +
           " us in fp32, " + formatted("%.4g", low_us) + " in 16 bits, " +
           formatted("%.4g", cast_us) + " in casts";
  }

  const AuditData& data_;
  double limit_;
  std::vector<AuditUnit> units_;
  std::vector<std::size_t> unit_of_;  // by row
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

  std::vector<detail::Chooser::Lowered> choices = chooser.choices();
  const double us_of_none = chooser.us(choices.back());
  std::erase_if(choices, [&](const auto& lowered) { return chooser.us(lowered) > us_of_none; });
  using Lowered = detail::Chooser::Lowered;
  const auto measured = [&](const Lowered& lowered) {
    AuditedPolicy tried = choice.policies(lowered);
    tried.error = error_under(tried.policy, tried.modules);
    return tried;
  };
  // The first that keeps to the budget; nothing lowered, the last, has no error.
  std::size_t low = 0, high = choices.size() - 1;
  AuditedPolicy best = choice.policies(choices[high]);
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    AuditedPolicy tried = measured(choices[middle]);
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
  Lowered chosen = choices[high], other = choices.back();
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

namespace detail {

inline std::string text_of(const AuditDecision& decision) {
  std::string reason = decision.reason;  // on one line
  std::replace_if(
      reason.begin(), reason.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return std::string(to_string(decision.lowered ? Cast::lower_precision : Cast::fp32)) + ": " +
         decision.op + "  # " + reason + '\n';
}

}  // namespace detail

inline void save_policy(const AuditedPolicy& audited, const std::string& path) {
  std::string text =
      "# Written by torchamp::save_policy: read it with torchamp::load_policies, or set\n"
      "# TORCHAMP_POLICY=file:PATH for the part about ops.\n# Error of the gradients " +
      detail::formatted("%.3g", audited.error) + ", of Policy::torch() " +
      detail::formatted("%.3g", audited.torch_error) + ".\npolicy torch\n";
  std::string module;
  for (const AuditDecision& decision : audited.decisions) {
    if (decision.module != module) {
      module = decision.module;
      TORCH_CHECK_VALUE(module.find_first_of("# \t\r\n") == std::string::npos,
                        "torchamp::save_policy: a file cannot name the module '", module,
                        "'. Register it under a name without '#' and spaces.");
      text += "module " + module + '\n';
    }
    text += detail::text_of(decision);
  }
  detail::write_text("torchamp::save_policy", path, text);
}

inline std::ostream& operator<<(std::ostream& out, const AuditedPolicy& audited) {
  out << "error of the gradients " << detail::formatted("%.3g", audited.error) << " (budget "
      << detail::formatted("%.3g", audited.budget) << ", Policy::torch() "
      << detail::formatted("%.3g", audited.torch_error) << ")\nus a step "
      << detail::formatted("%.1f", audited.us) << " (Policy::torch() "
      << detail::formatted("%.1f", audited.torch_us) << ", fp32 "
      << detail::formatted("%.1f", audited.fp32_us) << "; quartiles up to "
      << detail::formatted("%.1f", audited.spread_us) << " apart)\n";
  if (audited.us > audited.fp32_us + audited.spread_us) {
    out << "fp32 takes less time here: train without a guard\n";
  }
  out << "Policy::torch()" << (audited.decisions.empty() ? ", as it is\n" : ", and on top of it\n");
  std::string module;
  for (const AuditDecision& decision : audited.decisions) {
    if (decision.module != module) {
      module = decision.module;
      out << "in module " << module << ":\n";
    }
    out << "  " << detail::text_of(decision);
  }
  for (const std::string& op : audited.joined) {
    out << op
        << " follows one rule in several modules, which can have no policy of their own (unless"
           " they are declared as torchamp::WithPolicy<...>)\n";
  }
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
