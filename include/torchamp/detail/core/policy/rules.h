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

#include <algorithm>
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

namespace TORCHAMP_NAMESPACE::detail {

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

  Rule rule() const { return {.cast = cast, .op_rule = op_rule.get()}; }
  bool operator==(const Edit& other) const;
};

/// Indices of edits that apply to an overload; later edits come last. Only the first may be
/// unconditional.
using EditsOfOp = std::vector<std::size_t>;

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
// A table has a Row for each family of ops. The Row's Rule for a device, or the edits of a policy,
// are compiled into a CompiledRule for the op's autocast kernel. If no condition decides, a call
// has the compiled Rule. Otherwise PolicyData::decide() returns the Rule of the call.
// Policy::lookup and Policy::effect return the cast without a call. An OpRule is not a rule in this
// sense: it implements the rule fp8.

/// A policy's rule for one autocast kernel.
struct CompiledRule {
  Rule rule;  // if no condition decides
  const EditsOfOp* edits =
      nullptr;                   // not null if some are conditional; lives as long as the policy
  bool in_scripts_only = false;  // see Note [Compiled code]

  bool depends_on_call() const { return edits != nullptr || in_scripts_only; }
  bool leaves_all_to_libtorch() const { return rule.cast == Cast::native && !depends_on_call(); }
};

/// The contents of a Policy: a base table and edits. Immutable once shared.
class PolicyData {
 public:
  explicit PolicyData(BaseTable base_table) : base(base_table) {}
  /// A copy to edit; it starts without compiled tables.
  PolicyData(const PolicyData& other)
      : base(other.base), edits(other.edits), edits_of_ops(other.edits_of_ops) {}
  PolicyData& operator=(const PolicyData&) = delete;

  /// Whether both have the same base and equal edits.
  bool operator==(const PolicyData& other) const {
    return base == other.base && edits == other.edits;
  }

  /// The edits that apply to one overload; null if there are none.
  const EditsOfOp* edits_of(const c10::OperatorHandle& op) const {
    if (edits_of_ops.empty()) return nullptr;
    const auto found = edits_of_ops.find(full_name(op.operator_name()));
    return found == edits_of_ops.end() ? nullptr : &found->second;
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

  /// The rule of kernel `kernel` on a device whose rules have been compiled. Kernels that were
  /// registered later do not belong to the policy.
  CompiledRule rule(std::size_t device_index, std::size_t kernel) const {
    const std::vector<CompiledRule>& rules = compiled_[device_index].rules;
    return kernel < rules.size() ? rules[kernel] : CompiledRule();
  }

  /// Decides a rule that depends on the call, for one call, and reports the choice to recorders.
  Rule decide(const CompiledRule& compiled, at::DeviceType device, const OpCall& call) const;

  BaseTable base;
  std::vector<Edit> edits;
  std::map<std::string, EditsOfOp, std::less<>> edits_of_ops;  // by full_name(); none is empty

 private:
  /// Registers the autocast kernels that the policy needs on a device. Defined in
  /// autocast/autocast_kernel.h.
  void compile(std::size_t device_index) const;

  struct Compiled {
    std::atomic<bool> ready = false;
    std::vector<CompiledRule> rules;  // by a kernel's index
  };
  mutable std::mutex mutex_;
  mutable std::array<Compiled, device_count> compiled_;
};

/// Whether edit `index` of a policy still applies to some overload.
inline bool applies(const PolicyData& policy, std::size_t index) {
  for (const auto& [op, edits] : policy.edits_of_ops) {
    if (std::find(edits.begin(), edits.end(), index) != edits.end()) return true;
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

/// The rule of an op's autocast kernel under `policy`. If the kernel leaves all to LibTorch, the op
/// needs no kernel of torchamp.
CompiledRule compiled_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                           at::DeviceType device);

/// Calls `function` with the ops in a policy's tables and edits (not with ops that only LibTorch's
/// kernels cast); with some ops more than once.
void for_each_candidate(const PolicyData& policy,
                        c10::function_ref<void(const c10::OperatorHandle&)> function);

/// The rule of Cast::fp8 with these options. Error: fp8_rule_maker is null.
std::shared_ptr<const OpRule> make_fp8_rule(std::string_view options);
/// Adds an edit: see Policy::set. If it throws, `policy` is unchanged. `op_rule`: for the rule fp8;
/// null: the rule with default options.
void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
              std::shared_ptr<const OpRule> op_rule = nullptr);

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/policy/rules-inl.h"  // IWYU pragma: export
#endif
