// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "torchamp/detail/overlay/cast_arguments.h"
#include "torchamp/detail/policy/base_rules.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/rule.h"

namespace torchamp::detail {

/// The rule in force for one overload, conditional rules left out.
inline Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op,
                          at::DeviceType device) {
  const OverloadRules* edited = policy.edited(op);
  if (edited == nullptr || !edited->cast) return base_rule(policy.base, op, device);
  return *edited->cast == Cast::native ? base_rule(BaseTable::torch, op, device) : *edited->cast;
}

/// What that rule does, where LibTorch's own kernel decides what this does; native if that is not
/// known.
inline Cast effect_of_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                           at::DeviceType device) {
  const Cast cast = rule_in_force(policy, op, device);
  return cast == Cast::native ? kernel_rule(full_name(op.operator_name()), device) : cast;
}

/// The ops that a policy speaks of, LibTorch's kernels aside. Some come more than once.
inline std::vector<c10::OperatorHandle> candidates(const PolicyData& policy) {
  std::vector<c10::OperatorHandle> ops = base_candidates(policy.base);
  for (const auto& [name, rules] : policy.rules) {
    for (auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) ops.push_back(op);
  }
  return ops;
}

/// The overloads that an edit, called `call`, reaches with the name `name`.
inline std::vector<c10::OperatorHandle> overloads_to_edit(const std::string& call,
                                                          const CastRow& rule,
                                                          const std::string& name,
                                                          bool missing_ok) {
  std::vector<c10::OperatorHandle> found = find_ops(name, call, missing_ok);
  if (!rule.casts) return found;
  std::vector<c10::OperatorHandle> castable;
  std::string reason;
  for (const auto& op : found) {
    const std::string why = why_not_castable(op.schema());
    if (why.empty()) {
      castable.push_back(op);
    } else if (reason.empty()) {
      reason = why;
    }
  }
  TORCH_CHECK(!castable.empty() || missing_ok, call, ": '", name, "' cannot be cast: ", reason,
              ". Only out-of-place ops with tensor arguments can be.");
  return castable;
}

}  // namespace torchamp::detail
