// SPDX-License-Identifier: BSD-3-Clause
// From the edits of a policy to the rule of an op, and of a call.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"

namespace torchamp::detail {

// ---- The rule of a call -------------------------------------------------------------------------

/// Of the edits at these indices, the last whose condition holds for a call; null if none does.
inline const Edit* last_that_holds(const std::vector<Edit>& edits,
                                   const std::vector<std::size_t>& indices, at::ScalarType dtype,
                                   const OpCall& call) {
  // A predicate may call ops, even its own op; these calls are not part of the op.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::DisableRecordFunctionGuard not_recorded;
  for (std::size_t i = indices.size(); i-- > 0;) {
    const Edit& edit = edits[indices[i]];
    if (edit.when.holds(dtype, call)) return &edit;
  }
  return nullptr;
}

TORCHAMP_BODY CallRule PolicyData::decide(const KernelRule& of_kernel, at::DeviceType device,
                                          const OpCall& call) const {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  CallRule rule = of_kernel;
  const Edit* const edit = last_that_holds(edits, *of_kernel.conditional, dtype, call);
  if (edit != nullptr) rule = {.cast = edit->cast, .op_rule = edit->op_rule.get()};
  const bool is_for_scripts = of_kernel.in_scripts_only && torch::jit::currentCallstack().empty();
  if (is_for_scripts) rule = {};
  announce(choice_scope, to_string(rule.cast));
  rule.decided_by_call = true;
  return rule;
}

// ---- The rule of an op --------------------------------------------------------------------------

/// By the names of ops without their overloads: "mm" of "mm.out".
using StandardTable = std::unordered_map<std::string_view, std::vector<StandardEntry>>;

inline StandardTable make_standard_table() {
  StandardTable table;
  table.reserve(512);  // names: one growth instead of seven
  for (const StandardRow& row : standard_rows) {
    for (const std::string_view name : row.family) {
      const auto dot = name.find('.');
      std::optional<std::string_view> overload;
      if (dot != name.npos) overload = name.substr(dot + 1);
      table[name.substr(0, dot)].push_back({overload, row.rule, row.on_cpu, row.may_alias});
    }
  }
  for (const ListedRule& listed : libtorch_cuda_lists) {
    const TableRule rule{listed.cast, Where::no_native_kernel};
    // LibTorch's kernels throw for the 16-bit dtype other than the region's.
    const TableRule on_cuda = listed.cast == Cast::promote ? TableRule{Cast::promote} : rule;
    table[listed.op()].push_back({listed.overload(), on_cuda, rule, /*may_alias=*/false});
  }
  return table;
}

TORCHAMP_BODY const StandardEntry* standard_entry(const c10::OperatorName& op) {
  static const auto& table = *new StandardTable(make_standard_table());  // never destroyed
  const auto found = table.find(base_of(op));
  if (found == table.end()) return nullptr;
  for (const StandardEntry& entry : found->second) {
    if (!entry.overload || *entry.overload == op.overload_name) return &entry;
  }
  return nullptr;
}

TORCHAMP_BODY TabledOp::TabledOp(c10::OperatorHandle overload) : op(std::move(overload)) {
  const StandardEntry* const entry = standard_entry(op.operator_name());
  if (entry == nullptr || !(entry->may_alias || why_not_castable(op.schema()).empty())) return;
  rule = entry->rule;
  on_cpu = entry->on_cpu;
}

/// LibTorch's rule for an op: native if LibTorch has an autocast kernel for it.
inline Cast libtorch_rule(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) ? Cast::native : Cast::unchanged;
}

/// The rule of a policy's table for an op.
inline TableRule rule_of_table(BaseTable table, const TabledOp& of, at::DeviceType device) {
  const TableRule row = facts_of(device).follows_cuda_lists ? of.rule : of.on_cpu;
  const bool has_row = table == BaseTable::standard && row.cast != Cast::native;
  if (!has_row) return {libtorch_rule(of.op, device)};
  if (row.where != Where::no_native_kernel) return row;
  return {has_native_kernel(of.op, device) ? Cast::native : row.cast};
}

/// A policy's rule for an op, without conditional edits. `edited`: the effect of the edits on the
/// op, or null.
inline TableRule unconditional_rule(const PolicyData& policy, const OverloadRules* edited,
                                    const TabledOp& of, at::DeviceType device) {
  if (edited == nullptr || !edited->has_cast) return rule_of_table(policy.base, of, device);
  return {edited->cast == Cast::native ? libtorch_rule(of.op, device) : edited->cast};
}

TORCHAMP_BODY Cast lookup_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                               at::DeviceType device) {
  return unconditional_rule(policy, policy.edited(op), TabledOp(op), device).cast;
}

/// Whether LibTorch would cast the arguments of the op, or of ops that it calls.
inline bool may_be_cast_by_libtorch(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// Whether the op has a `dtype` argument that LibTorch's kernel sets to fp32, although the backward
/// formula needs the input in fp32.
inline bool lacks_cast_for_backward(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (is_dtype(argument, /*optional=*/true)) return !is_asked_for_dtype(schema);
  }
  return false;
}

/// Whether LibTorch's own kernel already follows a rule; known only for ops on CUDA's lists.
inline bool libtorch_does_so(Cast cast, const c10::OperatorHandle& op, at::DeviceType device) {
  if (cast == Cast::promote) return false;  // it throws for one of the two 16-bit dtypes
  return facts_of(device).follows_cuda_lists && has_native_kernel(op, device) &&
         listed_cast(op.operator_name()) == cast && !lacks_cast_for_backward(op.schema());
}

/// Whether an op needs an autocast kernel of torchamp for a rule. `is_edits`: the rule comes from
/// an edit.
inline bool needs_kernel(const TableRule& rule, bool is_edits, const c10::OperatorHandle& op,
                         at::DeviceType device) {
  if (rule.cast == Cast::native) return false;
  if (rule.where == Where::backward_sums) return true;
  // A table has this rule only for ops that LibTorch does not cast.
  if (rule.cast == Cast::unchanged) return is_edits && may_be_cast_by_libtorch(op, device);
  return !libtorch_does_so(rule.cast, op, device);
}

/// Whether compiled code may call the op's kernel: see Note [Compiled code].
inline bool is_called_by_compiled_code(const c10::OperatorHandle& op, at::DeviceType device) {
  return is_among(compiled_code_ops, base_of(op.operator_name())) && !has_native_kernel(op, device);
}

TORCHAMP_BODY KernelRule kernel_rule(const PolicyData& policy, const TabledOp& of,
                                     at::DeviceType device) {
  static const auto& no_edits = *new std::vector<std::size_t>;  // never destroyed
  const OverloadRules* const edited = policy.edited(of.op);
  const TableRule rule = unconditional_rule(policy, edited, of, device);
  const bool is_edits = edited != nullptr && edited->has_cast && edited->cast == rule.cast;
  KernelRule of_kernel;
  if (needs_kernel(rule, is_edits, of.op, device)) {
    of_kernel.cast = rule.cast;
    of_kernel.where = rule.where;
    if (rule.cast == Cast::fp8) of_kernel.op_rule = policy.edits[edited->edit].op_rule.get();
  }
  const bool has_conditions = edited != nullptr && !edited->conditional.empty();
  const bool has_rule = has_conditions || of_kernel.cast != Cast::native;
  of_kernel.in_scripts_only = has_rule && is_called_by_compiled_code(of.op, device);
  if (has_conditions) {
    of_kernel.conditional = &edited->conditional;
  } else if (of_kernel.in_scripts_only) {
    of_kernel.conditional = &no_edits;
  }
  return of_kernel;
}

TORCHAMP_BODY void for_each_candidate(const PolicyData& policy,
                                      c10::function_ref<void(const TabledOp&)> function) {
  if (policy.base == BaseTable::standard) {
    for (const c10::OperatorHandle& op : all_ops()) {
      const TabledOp tabled(op);
      if (tabled.rule.cast != Cast::native) function(tabled);
    }
  }
  for (const auto& [name, rules] : policy.rules) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) function(TabledOp(op));
  }
}

// ---- Edits --------------------------------------------------------------------------------------

/// Why an overload cannot follow a rule; empty if it can. `op_rule`: for the rule fp8, or null.
inline std::string why_not_op(const CastRow& row, const OpRule* op_rule,
                              const c10::OperatorHandle& op) {
  if (op_rule != nullptr) return op_rule->why_not_op(full_name(op.operator_name()));
  if (!row.casts) return {};
  const c10::FunctionSchema& schema = op.schema();
  // `promote` also applies to ops that write to a tensor in place.
  const bool may_write = row.cast == Cast::promote && schema.is_mutable() &&
                         schema.name().ends_with('_') &&
                         schema.arguments().front().type()->kind() == c10::TypeKind::TensorType;
  return may_write ? std::string() : std::string(why_not_castable(schema));
}

/// The overloads of `name` that can follow the rule. Error, which names `call`: there are none. In
/// a family, ops that LibTorch does not have, and ops that cannot be cast, are left out.
inline std::vector<std::string> reached_by(const std::string& name, bool is_family,
                                           const CastRow& row, const OpRule* op_rule,
                                           const std::string& call) {
  const std::vector<c10::OperatorHandle> found = find_ops(name, call, is_family);
  std::vector<std::string> reached;
  std::string reason;
  for (const auto& op : found) {
    const std::string why = why_not_op(row, op_rule, op);
    if (why.empty()) reached.push_back(full_name(op.operator_name()));
    if (reason.empty()) reason = why;
  }
  const bool may_be_none = is_family && (op_rule == nullptr || found.empty());
  TORCHAMP_CHECK(!reached.empty() || may_be_none || op_rule == nullptr, call, ": '", name,
                 "' cannot run in fp8: ", reason, ".");
  TORCHAMP_CHECK(!reached.empty() || may_be_none, call, ": '", name, "' cannot be cast: ", reason,
                 ". Only out-of-place ops with tensor arguments can be.");
  return reached;
}

/// Adds an edit that reaches these overloads. A name may be among them more than once.
inline void add(PolicyData& policy, Edit edit, const std::vector<std::string>& reached) {
  const std::size_t index = policy.edits.size();
  for (const std::string& op : reached) {
    OverloadRules& rules = policy.rules[op];
    if (edit.when.always()) {
      rules = {.has_cast = true, .cast = edit.cast, .edit = index};
    } else if (rules.conditional.empty() || rules.conditional.back() != index) {
      rules.conditional.push_back(index);
    }
  }
  policy.edits.push_back(std::move(edit));
}

TORCHAMP_BODY std::shared_ptr<const OpRule> make_fp8_rule(std::string_view options) {
  TORCHAMP_CHECK(fp8_rule_maker != nullptr,
                 "Policy::set: the rule fp8 needs torchamp/labs/fp8.h. Include it in some source "
                 "file.");
  return fp8_rule_maker(options);
}

TORCHAMP_BODY void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
                            std::shared_ptr<const OpRule> op_rule) {
  const CastRow* const row = row_of(rule);
  TORCHAMP_CHECK(row != nullptr, "Policy::set: ", static_cast<int>(rule),
                 " is not a rule of Cast.");
  const std::string call = (rule == Cast::fp8 ? "torchamp::" : "Policy::") + std::string(row->name);
  if (rule == Cast::fp8 && op_rule == nullptr) op_rule = make_fp8_rule("");
  TORCHAMP_CHECK(!when.dtype || is_16_bit(*when.dtype) || *when.dtype == at::kFloat, call,
                 ": When::dtype is ", c10::toString(*when.dtype),
                 ", but no region has that dtype. Pass torch::kHalf, torch::kBFloat16 or, for CUDA "
                 "regions, torch::kFloat.");
  const bool is_family = !ops.family().empty();
  std::vector<std::string> reached;
  for (const std::string& name : ops) {
    for (std::string& op : reached_by(name, is_family, *row, op_rule.get(), call)) {
      reached.push_back(std::move(op));
    }
  }
  if (ops.begin() == ops.end()) return;
  Edit edit{rule, {}, std::string(ops.family()), when, std::move(op_rule)};
  if (!is_family) edit.names.assign(ops.begin(), ops.end());
  add(policy, std::move(edit), reached);
}

}  // namespace torchamp::detail
