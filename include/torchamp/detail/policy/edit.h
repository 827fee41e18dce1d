// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/text.h"
#include "torchamp/ops.h"

namespace torchamp::detail {

/// The overloads that an edit, called `call`, reaches with the name `name`. `op_rule`: of the rule
/// fp8.
inline std::vector<c10::OperatorHandle> overloads_to_edit(const std::string& call,
                                                          const CastRow& rule,
                                                          const OpRule* op_rule,
                                                          const std::string& name,
                                                          bool missing_ok) {
  std::vector<c10::OperatorHandle> found = find_ops(name, call, missing_ok);
  if (!rule.casts) return found;
  std::vector<c10::OperatorHandle> castable;
  std::string reason;
  const bool fp8 = op_rule != nullptr;
  for (const auto& op : found) {
    const std::string why = fp8 ? op_rule->why_not_op(c10::toString(op.operator_name()))
                                : std::string(why_not_castable(op.schema()));
    if (why.empty()) {
      castable.push_back(op);
    } else if (reason.empty()) {
      reason = why;
    }
  }
  TORCH_CHECK(!castable.empty() || (missing_ok && (!fp8 || found.empty())), call, ": '", name,
              fp8 ? "' cannot run in fp8: " : "' cannot be cast: ", reason,
              fp8 ? "." : ". Only out-of-place ops with tensor arguments can be.");
  return castable;
}

/// Adds an edit: see Policy::set. Where it throws, `policy` is as it was. `op_rule`: of the rule
/// fp8, whose own by default.
inline void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
                     std::shared_ptr<const OpRule> op_rule = nullptr) {
  const CastRow* const row = row_of(rule);
  TORCH_CHECK(row != nullptr, "Policy::set: ", static_cast<int>(rule), " is not a rule of Cast.");
  const std::string call = "Policy::" + std::string(row->name);
  if (rule == Cast::fp8 && op_rule == nullptr) {
    TORCH_CHECK(fp8_rule_maker() != nullptr,
                "Policy::set: the rule fp8 needs torchamp/fp8.h. Include it in some source file.");
    op_rule = fp8_rule_maker()();
  }
  const bool is_family = !ops.family().empty();
  TORCH_CHECK(!when.dtype || *when.dtype == at::kHalf || *when.dtype == at::kBFloat16 ||
                  *when.dtype == at::kFloat,
              call, ": When::dtype is ", *when.dtype,
              ", but no region has that dtype. Give torch::kHalf, torch::kBFloat16 or, for regions "
              "of CUDA, torch::kFloat.");
  std::vector<std::string> reached;
  for (const std::string& name : ops) {
    for (const auto& op : overloads_to_edit(call, *row, op_rule.get(), name, is_family)) {
      reached.push_back(full_name(op.operator_name()));
    }
  }
  if (ops.begin() == ops.end()) return;
  for (const std::string& op : reached) {
    OverloadRules& rules = policy.rules[op];
    if (when.always()) {
      rules = {/*has_cast=*/true, rule, {}, policy.edits.size()};
    } else if (rules.conditional.empty() || rules.conditional.back() != policy.edits.size()) {
      rules.conditional.push_back(policy.edits.size());  // once, however many names reach it
    }
  }
  Edit edit{rule, {}, std::string(ops.family()), when, std::move(op_rule)};
  if (!is_family) edit.names.assign(ops.begin(), ops.end());
  policy.edits.push_back(std::move(edit));
}

/// A policy with one more edit: see Policy::set.
inline std::shared_ptr<const PolicyData> edited(const std::shared_ptr<const PolicyData>& policy,
                                                Cast rule, const OpNames& ops, const When& when,
                                                std::shared_ptr<const OpRule> op_rule = nullptr) {
  auto copy = std::make_shared<PolicyData>(*policy);
  add_edit(*copy, rule, ops, when, std::move(op_rule));
  return copy->edits.size() == policy->edits.size() ? policy : copy;
}

}  // namespace torchamp::detail
