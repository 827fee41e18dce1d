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

namespace TORCHAMP_NAMESPACE::detail {

// ---- The rule of a call -------------------------------------------------------------------------

/// Of these edits, the last whose conditions hold for a call; null if none does.
inline const Edit* last_that_holds(const std::vector<Edit>& edits, const EditsOfOp& indices,
                                   at::ScalarType dtype, const OpCall& call) {
  // A predicate may call ops, even its own op; these calls are not part of the op.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::DisableRecordFunctionGuard not_recorded;
  for (std::size_t i = indices.size(); i-- > 0;) {
    const Edit& edit = edits[indices[i]];
    if (edit.when.holds(dtype, call)) return &edit;
  }
  return nullptr;
}

TORCHAMP_BODY Rule PolicyData::decide(const CompiledRule& compiled, at::DeviceType device,
                                      const OpCall& call) const {
  Rule rule = compiled.rule;  // if no condition holds
  if (compiled.edits != nullptr) {
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    const Edit* const edit = last_that_holds(edits, *compiled.edits, dtype, call);
    if (edit != nullptr && !edit->when.always()) rule = edit->rule();
  }
  if (compiled.in_scripts_only && torch::jit::currentCallstack().empty()) rule = {};
  announce(choice_scope, to_string(rule.cast));
  return rule;
}

// ---- The rule of an op --------------------------------------------------------------------------

/// An overload that a row names, or all of an op, and the row.
using OverloadAndRow = std::pair<std::optional<std::string_view>, const Row*>;
/// By the names of ops without their overloads: "mm" of "mm.out".
using StandardTable = std::unordered_map<std::string_view, std::vector<OverloadAndRow>>;

inline StandardTable make_standard_table() {
  StandardTable table;
  table.reserve(512);  // names: one growth instead of seven
  const auto add = [&](const auto& rows) {
    for (const Row& row : rows) {
      for (const std::string_view name : row.family) {
        table[op_in(name)].emplace_back(overload_in(name), &row);
      }
    }
  };
  add(standard_rows);
  add(cuda_rows);
  return table;
}

TORCHAMP_BODY const Row* standard_row(const c10::OperatorName& op) {
  static const auto& table = *new StandardTable(make_standard_table());  // never destroyed
  const auto found = table.find(base_of(op));
  if (found == table.end()) return nullptr;
  for (const auto& [overload, row] : found->second) {
    if (!overload || *overload == op.overload_name) return row;
  }
  return nullptr;
}

/// The row of an overload that can be cast; null if there is none.
inline const Row* row_for(const c10::OperatorHandle& op) {
  const Row* const row = standard_row(op.operator_name());
  if (row == nullptr || row->may_alias) return row;
  return why_not_castable(op.schema()).empty() ? row : nullptr;
}

/// LibTorch's rule for an op: native if LibTorch has an autocast kernel for it.
inline Cast libtorch_rule(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) ? Cast::native : Cast::unchanged;
}

/// The rule of a policy's table for an op.
inline Rule rule_of_table(BaseTable table, const c10::OperatorHandle& op, at::DeviceType device) {
  const Row* const row = table == BaseTable::standard ? row_for(op) : nullptr;
  Rule rule;
  if (row != nullptr) rule = facts_of(device).follows_cuda_lists ? row->rule : row->on_cpu;
  if (rule.cast == Cast::native) return {libtorch_rule(op, device)};
  if (rule.where != Where::no_native_kernel) return rule;
  return {has_native_kernel(op, device) ? Cast::native : rule.cast};
}

/// The edit that sets an op's rule for all calls for which no conditional edit does; null if there
/// is none.
inline const Edit* unconditional_edit(const PolicyData& policy, const EditsOfOp* edits) {
  if (edits == nullptr) return nullptr;
  const Edit& first = policy.edits[edits->front()];
  return first.when.always() ? &first : nullptr;
}

/// The rule of an op if `edit` is its unconditional edit, or null.
inline Rule unconditional_rule(const PolicyData& policy, const Edit* edit,
                               const c10::OperatorHandle& op, at::DeviceType device) {
  if (edit == nullptr) return rule_of_table(policy.base, op, device);
  return edit->cast == Cast::native ? Rule{libtorch_rule(op, device)} : edit->rule();
}

TORCHAMP_BODY Cast lookup_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                               at::DeviceType device) {
  const Edit* const edit = unconditional_edit(policy, policy.edits_of(op));
  return unconditional_rule(policy, edit, op, device).cast;
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

/// Whether an op needs an autocast kernel of torchamp for a rule. `edit`: the edit that set it, or
/// null.
inline bool needs_kernel(const Rule& rule, const Edit* edit, const c10::OperatorHandle& op,
                         at::DeviceType device) {
  if (rule.cast == Cast::native) return false;
  if (rule.where == Where::backward_sums) return true;
  if (rule.cast == Cast::unchanged) {
    // Without such an edit, LibTorch does not cast the op.
    const bool is_edited = edit != nullptr && edit->cast == Cast::unchanged;
    return is_edited && may_be_cast_by_libtorch(op, device);
  }
  return !libtorch_does_so(rule.cast, op, device);
}

/// Whether compiled code may call the op's kernel: see Note [Compiled code].
inline bool is_called_by_compiled_code(const c10::OperatorHandle& op, at::DeviceType device) {
  return is_among(compiled_code_ops, base_of(op.operator_name())) && !has_native_kernel(op, device);
}

TORCHAMP_BODY CompiledRule compiled_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                                         at::DeviceType device) {
  const EditsOfOp* const edits = policy.edits_of(op);
  const Edit* const edit = unconditional_edit(policy, edits);
  CompiledRule compiled;
  const Rule rule = unconditional_rule(policy, edit, op, device);
  if (needs_kernel(rule, edit, op, device)) compiled.rule = rule;
  const bool has_conditions = edits != nullptr && edits->size() > (edit == nullptr ? 0u : 1u);
  if (has_conditions) compiled.edits = edits;
  compiled.in_scripts_only =
      !compiled.leaves_all_to_libtorch() && is_called_by_compiled_code(op, device);
  return compiled;
}

TORCHAMP_BODY void for_each_candidate(
    const PolicyData& policy, c10::function_ref<void(const c10::OperatorHandle&)> function) {
  if (policy.base == BaseTable::standard) {
    for (const c10::OperatorHandle& op : all_ops()) {
      const Row* const row = row_for(op);
      if (row != nullptr && row->rule.cast != Cast::native) function(op);
    }
  }
  for (const auto& [name, edits] : policy.edits_of_ops) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) function(op);
  }
}

// ---- Edits --------------------------------------------------------------------------------------

TORCHAMP_BODY bool Edit::operator==(const Edit& other) const {
  const bool has_one = op_rule != nullptr && other.op_rule != nullptr;
  return cast == other.cast && names == other.names && family == other.family &&
         when == other.when &&
         (has_one ? op_rule->text() == other.op_rule->text() : op_rule == other.op_rule);
}

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
    EditsOfOp& edits = policy.edits_of_ops[op];
    if (edit.when.always()) edits.clear();
    if (edits.empty() || edits.back() != index) edits.push_back(index);
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
  when.check(call);
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

}  // namespace TORCHAMP_NAMESPACE::detail
