// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <map>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/extras/policy_text/print.h"
#include "torchamp/labs/detail/audit/text.h"
#include "torchamp/labs/detail/modules/name_pattern.h"
#include "torchamp/labs/detail/modules/with_policy.h"
#include "torchamp/labs/precision_audit.h"

namespace TORCHAMP_NAMESPACE::detail {

inline Cast rule_of(const AuditDecision& decision) {
  return decision.lowered ? Cast::lower_precision : Cast::fp32;
}

inline std::string text_of(const AuditDecision& decision) {
  return std::string(to_string(rule_of(decision))) + ": " + decision.op + "  # " +
         on_one_line(decision.reason) + '\n';
}

using AuditDecisions = std::map<std::string, const AuditDecision*>;  // of one module, by op

/// `policy` with the decided rules.
inline std::shared_ptr<const PolicyData> with_decisions(const PolicyData& policy,
                                                        const AuditDecisions& decided) {
  auto copy = std::make_shared<PolicyData>(policy);
  for (const auto& [op, decision] : decided) add_edit(*copy, rule_of(*decision), op, {});
  return copy;
}

/// The text of a policy's edits from `first` on, with the reasons of decided ones.
inline std::string text_of_edits(const PolicyData& policy, std::size_t first,
                                 const AuditDecisions& decided) {
  const std::vector<std::string> lines = lines_of_edits("torchamp::save_policy", policy);
  std::string text;
  for (std::size_t i = first; i < lines.size(); ++i) {
    if (lines[i].empty()) continue;
    const Edit& edit = policy.edits[i];
    const auto found = edit.names.size() == 1 ? decided.find(edit.names[0]) : decided.end();
    const bool was_decided =
        found != decided.end() && edit.when.always() && edit.cast == rule_of(*found->second);
    text += was_decided ? text_of(*found->second) : lines[i] + '\n';
  }
  return text;
}

inline std::string text_of_base(const PolicyData& policy) {
  return "policy " + std::string(to_string(policy.base)) + '\n';
}

/// For load_policies(): a module's edits beyond `common`; if its policy does not extend `common`,
/// all of it.
inline std::string text_of_module(const PolicyData& policy, const PolicyData& common,
                                  const AuditDecisions& decided) {
  const std::size_t size = common.edits.size();
  const bool goes_on = policy.base == common.base && policy.edits.size() >= size &&
                       std::equal(common.edits.begin(), common.edits.end(), policy.edits.begin());
  return goes_on ? text_of_edits(policy, size, decided)
                 : text_of_base(policy) + text_of_edits(policy, 0, decided);
}

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

inline void save_policy(const AuditedPolicy& audited, const std::string& path) {
  std::map<std::string, detail::AuditDecisions> decided;  // by module
  for (const AuditDecision& decision : audited.decisions) {
    decided[detail::pattern_of(decision.module)][decision.op] = &decision;
  }
  const detail::AuditDecisions of_all = decided[""];
  decided.erase("");
  auto common = audited.policy.data();
  if (common->base == detail::BaseTable::torch && common->edits.empty()) {
    common = detail::with_decisions(*common, of_all);
  }
  std::string text =
      "# Written by torchamp::save_policy: read it with torchamp::load_policies, or set\n"
      "# TORCHAMP_POLICY=file:PATH for the part about ops.\n# Error of the gradients " +
      detail::number_text(audited.error, 3) + ", of Policy::torch() " +
      detail::number_text(audited.torch_error, 3) + ".\n" + detail::text_of_base(*common) +
      detail::text_of_edits(*common, 0, of_all);
  const auto add_module = [&](const std::string& module, const Policy& policy) {
    TORCH_CHECK_VALUE(!module.empty() && module.find_first_of("# \t\r\n") == std::string::npos,
                      "torchamp::save_policy: a file cannot name the module '", module,
                      "'. Register it under a name without '#' and spaces.");
    text += "module " + module + '\n' +
            detail::text_of_module(*policy.data(), *common, decided[module]);
    decided.erase(module);
  };
  for (const auto& [module, policy] : audited.modules.entries()) add_module(module, policy);
  while (!decided.empty()) {
    const auto& [module, decisions] = *decided.begin();
    add_module(std::string(module), Policy(detail::with_decisions(*common, decisions)));
  }
  detail::replace_file("torchamp::save_policy", path, text);
}

inline std::ostream& operator<<(std::ostream& out, const AuditedPolicy& audited) {
  out << "error of the gradients " << detail::number_text(audited.error, 3) << " (budget "
      << detail::number_text(audited.budget, 3) << ", Policy::torch() "
      << detail::number_text(audited.torch_error, 3) << ")\nus a step "
      << detail::fixed_text(audited.us, 1) << " (Policy::torch() "
      << detail::fixed_text(audited.torch_us, 1) << ", fp32 "
      << detail::fixed_text(audited.fp32_us, 1) << "; quartiles up to "
      << detail::fixed_text(audited.spread_us, 1) << " apart)\n";
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
