// SPDX-License-Identifier: BSD-3-Clause
// The contents of a policy, and its rule for an op.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace torchamp::detail {

class PolicyData;

// ---- Rules that an extra carries out ------------------------------------------------------------

/// Records the calls in a region whose policy has an OpRule. For several threads.
class OpRuleUsage {
 public:
  virtual ~OpRuleUsage() = default;
  /// Records a call of an op that has a kernel of torchamp and that the rule does not cover.
  virtual void passed_by(const c10::OperatorName& op) = 0;
  /// Called at the region's end.
  virtual void warn_if_unused() const = 0;
};

/// The implementation of a policy's fp8 rule by torchamp/labs/fp8.h, with its options. Immutable.
class OpRule {
 public:
  virtual ~OpRule() = default;

  /// Called before a 16-bit region of a device whose policy has the rule. Error, which names
  /// `call`: a strict rule that the region cannot follow.
  virtual void prepare(const char* call, const PolicyData& policy, at::DeviceType device,
                       at::ScalarType dtype) const = 0;
  /// Runs a call: replaces the arguments on the stack by the result. If it cannot, it returns false
  /// and the stack is unchanged. Autocast is off. `usage` may be null.
  virtual bool run(const c10::OperatorHandle& op, at::DeviceType device, torch::jit::Stack& stack,
                   OpRuleUsage* usage) const = 0;
  /// Why an overload cannot follow the rule; empty if it can.
  virtual std::string why_not_op(std::string_view full_name) const = 0;
  /// The rule in a policy's text: "fp8(recipe=rowwise strict)". Rules with equal texts are equal.
  virtual std::string text() const = 0;
  /// For a new region; `outer`: the usage of the outer region, or null.
  virtual std::shared_ptr<OpRuleUsage> make_usage(
      const std::shared_ptr<OpRuleUsage>& outer) const = 0;
};

/// Makes the rule of Cast::fp8 with options as in a policy's text ("recipe=rowwise strict").
/// torchamp/labs/fp8.h registers it; otherwise null.
using MakeOpRule = std::shared_ptr<const OpRule> (*)(std::string_view options);
inline MakeOpRule fp8_rule_maker = nullptr;

// ---- A policy's contents ------------------------------------------------------------------------

enum class BaseTable : std::uint8_t { standard, torch };

/// One call of an edit, as the user wrote it.
struct Edit {
  Cast cast;
  std::vector<std::string> names;
  std::string family;  // instead of `names`, if not empty
  When when;
  std::shared_ptr<const OpRule> op_rule = nullptr;  // not null for the rule fp8
};

/// The effect of the edits on one overload.
struct OverloadRules {
  bool has_cast = false;  // whether an unconditional edit has set `cast`
  Cast cast = Cast::native;
  std::vector<std::size_t> conditional = {};  // conditional edits; later ones come last
  std::size_t edit = 0;                       // the edit that set `cast`
};

/// By full_name().
using RuleMap = std::map<std::string, OverloadRules, std::less<>>;

// Note [Reports of a choice]
// A predicate is called once for each call of its op, and only the op's autocast kernel has its
// result. To report it to recorders (a CastRecorder, LibTorch's profiler), the kernel opens and
// closes an empty user scope in the op. The scope's name is this text and the name of the rule.
inline constexpr std::string_view choice_scope = "torchamp rule: ";
/// The same for the rule fp8. The reason why a call did not run in fp8 follows; nothing follows if
/// it did.
inline constexpr std::string_view fp8_scope = "torchamp fp8: ";

inline void announce(std::string_view kind, std::string_view what) {
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    at::RecordFunction scope(std::move(*callbacks));
    scope.before(std::string(kind).append(what));
  }
}

// Note [From a table to a call]
// A rule is a Cast and the calls for which it holds: a TableRule in a row of a table. Compiled for
// a device, with the edits of the policy, it becomes the KernelRule of an op's autocast kernel. If
// the KernelRule depends on the call, each call decides it: the result is the CallRule.
// Policy::lookup and Policy::effect return the rule without a call. Cast::native means that
// LibTorch's own autocast kernel decides. So it also means "no row" in a table, and "nothing to do"
// in a kernel of torchamp. An OpRule is not a rule in this sense: it implements the rule fp8.

/// The rule of an autocast kernel for one call.
struct CallRule {
  Cast cast = Cast::native;
  Where where = Where::always;      // if call_is_refused, only for such calls
  const OpRule* op_rule = nullptr;  // not null for Cast::fp8
  bool decided_by_call = false;     // of a KernelRule that depends on the call
};

/// A policy's rules for one autocast kernel.
struct KernelRule : CallRule {
  /// Indices of conditional edits in PolicyData::edits, which are tried first. Lives as long as
  /// PolicyData::rules. Null: the rule is the same for all calls. Empty: the rule depends on the
  /// call, but not on an edit.
  const std::vector<std::size_t>* conditional = nullptr;
  bool in_scripts_only = false;  // see Note [Compiled code]; the rule depends on the call then

  bool depends_on_call() const { return conditional != nullptr; }
  bool leaves_all_to_libtorch() const { return cast == Cast::native && !depends_on_call(); }
};

/// By a kernel's index. Kernels that were registered later do not belong to the policy.
using KernelRules = std::vector<KernelRule>;

/// The contents of a Policy: a base table and edits. Immutable once shared.
class PolicyData {
 public:
  explicit PolicyData(BaseTable base_table) : base(base_table) {}
  /// A copy to edit; it starts without compiled tables.
  PolicyData(const PolicyData& other) : base(other.base), edits(other.edits), rules(other.rules) {}
  PolicyData& operator=(const PolicyData&) = delete;

  /// The effect of the edits on one overload; null if they do not reach it.
  const OverloadRules* edited(const c10::OperatorHandle& op) const {
    if (rules.empty()) return nullptr;
    const auto found = rules.find(full_name(op.operator_name()));
    return found == rules.end() ? nullptr : &found->second;
  }

  /// An edit's OpRule, which later edits may have replaced; null if there is none.
  const OpRule* op_rule() const {
    for (const Edit& edit : edits) {
      if (edit.op_rule != nullptr) return edit.op_rule.get();
    }
    return nullptr;
  }

  /// Makes the policy ready for use on a device, by its device_index(). Any thread.
  void compile_once(std::size_t device_index) const {
    const bool is_ready = compiled_[device_index].ready.load(std::memory_order_acquire);
    if (!is_ready) compile(device_index);
  }

  /// The rule of kernel `kernel` on a device, whose rules have been compiled, for one call.
  CallRule rule(std::size_t device_index, std::size_t kernel, at::DeviceType device,
                const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> stack) const {
    const KernelRules& rules_of_device = compiled_[device_index].rules;
    if (kernel >= rules_of_device.size()) return {};
    const KernelRule& rule = rules_of_device[kernel];
    if (!rule.depends_on_call()) return rule;
    return decide(rule, device, OpCall(op.schema(), stack));
  }

  BaseTable base;
  std::vector<Edit> edits;
  RuleMap rules;  // the effect of the edits on each overload

 private:
  /// Registers the autocast kernels that the policy needs on a device. Defined in
  /// autocast/autocast_kernel.h.
  void compile(std::size_t device_index) const;
  /// Decides a rule that depends on the call, for one call, and reports the choice to recorders.
  CallRule decide(const KernelRule& rule, at::DeviceType device, const OpCall& call) const;

  struct Compiled {
    std::atomic<bool> ready = false;
    KernelRules rules;
  };
  mutable std::mutex mutex_;
  mutable std::array<Compiled, device_count> compiled_;
};

/// Whether edit `index` of a policy still applies to some overload.
inline bool applies(const PolicyData& policy, std::size_t index) {
  for (const auto& [op, of_op] : policy.rules) {
    if (of_op.has_cast && of_op.edit == index) return true;
    for (const std::size_t conditional : of_op.conditional) {
      if (conditional == index) return true;
    }
  }
  return false;
}

/// The contents of Policy::standard() and Policy::torch(), which all copies share.
inline const std::shared_ptr<const PolicyData>& unedited(BaseTable base) {
  // Never destroyed: static objects' destructors may use guards.
  static const auto& tables = *new std::array<std::shared_ptr<const PolicyData>, 2>{
      std::make_shared<PolicyData>(BaseTable::standard),
      std::make_shared<PolicyData>(BaseTable::torch)};
  return tables[static_cast<std::size_t>(base)];
}

// ---- The rule of an op --------------------------------------------------------------------------

/// Policy::lookup of one overload, in regions of the calling thread's dtype for the device.
Cast lookup_rule(const PolicyData& policy, const c10::OperatorHandle& op, at::DeviceType device);

/// Policy::effect of one overload.
inline Cast lookup_effect(const PolicyData& policy, const c10::OperatorHandle& op,
                          at::DeviceType device) {
  const Cast cast = lookup_rule(policy, op, device);
  return cast == Cast::native ? effect_of_native(op.operator_name(), device) : cast;
}

/// An overload, and its row in the table of Policy::standard(). Cast::native: it has none, or
/// cannot be cast.
struct TabledOp {
  c10::OperatorHandle op;
  TableRule rule;
  TableRule on_cpu;  // as in a StandardRow

  explicit TabledOp(c10::OperatorHandle overload);
};

/// The rule of an op's autocast kernel under `policy`. Without conditional edits, Cast::native
/// means that LibTorch's kernel does everything.
KernelRule kernel_rule(const PolicyData& policy, const TabledOp& op, at::DeviceType device);

/// Calls `function` with the ops in a policy's tables and edits (not with ops that only LibTorch's
/// kernels cast); with some ops more than once.
void for_each_candidate(const PolicyData& policy,
                        c10::function_ref<void(const TabledOp&)> function);

/// The rule of Cast::fp8 with these options. Error: fp8_rule_maker is null.
std::shared_ptr<const OpRule> make_fp8_rule(std::string_view options);
/// Adds an edit: see Policy::set. If it throws, `policy` is unchanged. `op_rule`: for the rule fp8;
/// null: the rule with default options.
void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
              std::shared_ptr<const OpRule> op_rule = nullptr);

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/policy/rules-inl.h"  // IWYU pragma: export
#endif
