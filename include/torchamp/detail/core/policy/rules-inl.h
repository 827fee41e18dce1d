// SPDX-License-Identifier: BSD-3-Clause
// From the edits of a policy to the rule of an op, and of a call.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/recurrent_layers.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"

namespace torchamp::detail {

// ---- The rule of a call -------------------------------------------------------------------------

TORCHAMP_COLD OverlayRule PolicyData::choose(const OverlayEntry& entry, at::DeviceType device,
                                             const OpCall& call) const {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  OverlayRule rule = entry;
  for (std::size_t i = entry.conditional->size(); i-- > 0;) {  // the last that holds wins
    const Edit& edit = edits[(*entry.conditional)[i]];
    // A predicate may call ops, its own among them, and these are no part of the op.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::DisableRecordFunctionGuard not_recorded;
    if (!edit.when.holds(dtype, call)) continue;
    rule = {.cast = edit.cast, .op_rule = edit.op_rule.get()};
    break;
  }
  if (entry.in_scripts_only && torch::jit::currentCallstack().empty()) rule = {};
  if (rule.cast == fp32_where_lacking) {
    rule.cast = has_recurrent_layers(device, dtype) ? Cast::native : Cast::fp32;
    if (rule.cast == Cast::fp32) warn_of_recurrent_layers_in_fp32(dtype);
  }
  announce(choice_scope, to_string(rule.cast == fp32_where_it_must ? Cast::fp32 : rule.cast));
  rule.is_chosen = true;
  return rule;
}

// ---- The rule of an op --------------------------------------------------------------------------

TORCHAMP_COLD TabledOp::TabledOp(c10::OperatorHandle overload, const StandardRow* row)
    : op(std::move(overload)) {
  if (row == nullptr) row = standard_row(op.operator_name());
  const StandardRule rule =
      row != nullptr ? row->rule
                     : StandardRule{.cast = listed_cast(op.operator_name()), .unless_native = true};
  if (rule.may_alias || why_not_castable(op.schema()).empty()) standard = rule;
}

/// The rule of a base table for one overload, before any edit; may be one that only tables have.
inline Cast base_rule(BaseTable base, const TabledOp& of, at::DeviceType device) {
  const StandardRule& rule = of.standard;
  const bool holds = base == BaseTable::standard && rule.cast != Cast::native;
  if (holds && !rule.unless_native) {
    return facts_of(device).follows_cuda_lists ? rule.cast : rule.cast_on_cpu;
  }
  if (has_native_kernel(of.op, device)) return Cast::native;
  return holds ? rule.cast : Cast::unchanged;
}

/// The same under a policy, conditional rules left out. `edited`: what its edits made of the
/// overload, or null.
inline Cast tabled_rule(const PolicyData& policy, const OverloadRules* edited, const TabledOp& op,
                        at::DeviceType device) {
  if (edited == nullptr || !edited->has_cast) return base_rule(policy.base, op, device);
  return edited->cast == Cast::native ? base_rule(BaseTable::torch, op, device) : edited->cast;
}

TORCHAMP_COLD Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op,
                                 at::DeviceType device) {
  const TabledOp tabled(op);
  const Cast cast = tabled_rule(policy, policy.edited(op), tabled, device);
  if (cast == fp32_where_it_must) return Cast::fp32;
  if (cast != fp32_where_lacking) return cast;
  return has_recurrent_layers(device, at::autocast::get_autocast_dtype(device))
             ? base_rule(BaseTable::torch, tabled, device)
             : Cast::fp32;
}

TORCHAMP_COLD OverlayEntry overlay_entry(const PolicyData& policy, const TabledOp& of,
                                         at::DeviceType device) {
  static const auto& no_edits = *new std::vector<std::size_t>;  // never destroyed
  OverlayEntry entry;
  const OverloadRules* const edited = policy.edited(of.op);
  const Cast cast = tabled_rule(policy, edited, of, device);
  const bool may_be_compiled = is_among(compiled_code_ops, base_of(of.op.operator_name())) &&
                               !has_native_kernel(of.op, device);
  if (cast == Cast::unchanged) {
    // To stay unchanged, an op with an autocast kernel, or that calls such ops, must be shielded.
    const bool is_edited = edited != nullptr && edited->has_cast && edited->cast == cast;
    if (is_edited && (has_native_kernel(of.op, device) ||
                      of.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))) {
      entry.cast = cast;
    }
  } else if (!facts_of(device).follows_cuda_lists || !has_native_kernel(of.op, device) ||
             listed_cast(of.op.operator_name()) != cast) {
    // LibTorch's kernel is known to do the same only if it follows these lists.
    entry.cast = cast;
    if (cast == Cast::fp8) entry.op_rule = policy.edits[edited->edit].op_rule.get();
  }
  if (edited != nullptr && !edited->conditional.empty()) {
    entry.conditional = &edited->conditional;
  } else if (cast == fp32_where_lacking || (may_be_compiled && entry.cast != Cast::native)) {
    entry.conditional = &no_edits;
  }
  entry.in_scripts_only = may_be_compiled && entry.conditional != nullptr;
  return entry;
}

TORCHAMP_COLD void for_each_candidate(const PolicyData& policy,
                                      c10::function_ref<void(const TabledOp&)> function) {
  const auto add = [&](const TabledOp& tabled) {
    if (tabled.standard.cast != Cast::native) function(tabled);
  };
  if (policy.base == BaseTable::standard) {
    for (const StandardRow& row : standard_rows) {
      for (const std::string_view name : row.family) {
        for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
          add(TabledOp(op, &row));
        }
      }
    }
    for (const ListedRule& rule : libtorch_cuda_lists) {
      const auto op = c10::Dispatcher::singleton().findSchema(
          {std::string("aten::").append(rule.op()), std::string(rule.overload())});
      if (op) add(TabledOp(*op));
    }
  }
  for (const auto& [name, rules] : policy.rules) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
      function(TabledOp(op));
    }
  }
}

// ---- Edits --------------------------------------------------------------------------------------

TORCHAMP_COLD void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
                            std::shared_ptr<const OpRule> op_rule) {
  const CastRow* const row = row_of(rule);
  TORCHAMP_CHECK(row != nullptr, "Policy::set: ", static_cast<int>(rule),
                 " is not a rule of Cast.");
  const std::string call = "Policy::" + std::string(row->name);
  if (rule == Cast::fp8 && op_rule == nullptr) {
    TORCHAMP_CHECK(
        fp8_rule_maker != nullptr,
        "Policy::set: the rule fp8 needs torchamp/fp8.h. Include it in some source file.");
    op_rule = fp8_rule_maker();
  }
  TORCHAMP_CHECK(!when.dtype || is_16_bit(*when.dtype) || *when.dtype == at::kFloat, call,
                 ": When::dtype is ", c10::toString(*when.dtype),
                 ", but no region has that dtype. Pass torch::kHalf, torch::kBFloat16 or, for CUDA "
                 "regions, torch::kFloat.");
  const bool is_family = !ops.family().empty();
  const bool fp8 = op_rule != nullptr;
  std::vector<std::string> reached;
  for (const std::string& name : ops) {
    const std::vector<c10::OperatorHandle> found = find_ops(name, call, is_family);
    const std::size_t reached_before = reached.size();
    std::string reason;
    for (const auto& op : found) {
      std::string full = full_name(op.operator_name());
      const c10::FunctionSchema& schema = op.schema();
      // `promote` reaches ops that write to a tensor in place, too.
      const bool may_write = rule == Cast::promote && schema.is_mutable() &&
                             schema.name().ends_with('_') &&
                             schema.arguments().front().type()->kind() == c10::TypeKind::TensorType;
      const std::string why = fp8                        ? op_rule->why_not_op(full)
                              : row->casts && !may_write ? std::string(why_not_castable(schema))
                                                         : std::string();
      if (why.empty()) reached.push_back(std::move(full));
      if (reason.empty()) reason = why;
    }
    TORCHAMP_CHECK(reached.size() > reached_before || (is_family && (!fp8 || found.empty())), call,
                   ": '", name, fp8 ? "' cannot run in fp8: " : "' cannot be cast: ", reason,
                   fp8 ? "." : ". Only out-of-place ops with tensor arguments can be.");
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

}  // namespace torchamp::detail
