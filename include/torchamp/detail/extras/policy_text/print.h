// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <map>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/policy_text/conditions.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The rule called `name`; null if there is none.
constexpr const CastRow* row_named(std::string_view name) {
  for (const CastRow& row : cast_rows) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

/// "standard" or "torch".
inline std::string_view to_string(BaseTable base) {
  return base == BaseTable::standard ? "standard" : "torch";
}

/// One edit as text: "fp32 when float16: ops::norm, pow".
inline std::string to_string(const Edit& edit) {
  std::string text(torchamp::to_string(edit.cast));
  if (edit.op_rule != nullptr) text = edit.op_rule->text();
  text += conditions_text(edit.when) + ": ";
  if (!edit.family.empty()) return text + "ops::" + edit.family;
  return text + c10::Join(", ", edit.names);
}

/// Prints `names` separated by commas, in lines of at most 100 columns.
inline void print_wrapped(std::ostream& out, const std::vector<std::string>& names) {
  std::string line;
  for (const std::string& name : names) {
    if (line.size() + name.size() > 93) {
      out << "    " << line << ",\n";
      line.clear();
    }
    line += (line.empty() ? "" : ", ") + name;
  }
  out << "    " << line << '\n';
}

/// A rule, and what it does: see Policy::effect.
using PrintedRule = std::pair<Cast, Cast>;

/// The rules on a device, for all ops of the policy and of LibTorch's kernels.
inline std::map<std::string, PrintedRule> rules_in_force(const PolicyData& policy,
                                                         at::DeviceType device) {
  std::map<std::string, PrintedRule> rules;
  const auto add = [&](const c10::OperatorHandle& op) {
    rules[full_name(op.operator_name())] = {lookup_rule(policy, op, device),
                                            lookup_effect(policy, op, device)};
  };
  for_each_candidate(policy, add);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(autocast_key(device))) {
    // The dispatcher also has torchamp's kernels, which earlier policies have registered.
    const auto op = dispatcher.findSchema(name);
    if (op && has_native_kernel(*op, device)) add(*op);
  }
  return rules;
}

/// Prints the ops of one rule. If LibTorch's kernels decide: the ops with this `effect`.
inline void print_group(std::ostream& out, const std::map<std::string, PrintedRule>& rules,
                        Cast cast, Cast effect) {
  std::vector<std::string> names;
  for (const auto& [op, rule] : rules) {
    if (rule != PrintedRule{cast, effect}) continue;
    names.push_back(op.starts_with("aten::") ? op.substr(6) : op);
  }
  if (names.empty()) return;
  out << "  " << torchamp::to_string(cast);
  if (effect != cast) out << ": " << torchamp::to_string(effect);
  out << '\n';
  print_wrapped(out, names);
}

/// Whether to print a device type: for each kind of lists the first type that follows them, so that
/// a table printed without a GPU shows the rules on a GPU; and all types that are present.
inline bool is_to_print(const DeviceFacts& row) {
  for (const DeviceFacts& facts : device_facts) {
    if (facts.follows_cuda_lists != row.follows_cuda_lists) continue;
    return &facts == &row || device_is_present(row.type);
  }
  return false;
}

inline void print_policy(std::ostream& out, const PolicyData& policy) {
  out << "torchamp policy: " << to_string(policy.base) << '\n';
  for (const Edit& edit : policy.edits) {
    out << "  " << to_string(edit) << (edit.when.predicate ? "  (when its predicate holds)" : "")
        << '\n';
  }
  for (const DeviceFacts& facts : device_facts) {
    if (!is_to_print(facts)) continue;
    const at::DeviceType device = facts.type;
    out << "on " << c10::DeviceTypeName(device, /*lower_case=*/true) << '\n';
    const auto rules = rules_in_force(policy, device);
    for (const CastRow& effect : cast_rows) {
      print_group(out, rules, Cast::native, effect.cast);
    }
    for (const CastRow& row : cast_rows) {
      if (row.cast != Cast::native) print_group(out, rules, row.cast, row.cast);
    }
  }
  out << "every other op: unchanged\n";
  for (const CastRow& row : cast_rows) out << row.name << ": " << row.effect << '\n';
}

}  // namespace TORCHAMP_NAMESPACE::detail
