// SPDX-License-Identifier: BSD-3-Clause
// What a policy holds, and the policy in force on a thread.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/graph_task.h>

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

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace torchamp::detail {

class PolicyData;

/// "aten::add.Tensor". c10::toString() writes the same through a stream, which takes ten times as
/// long.
inline std::string full_name(const c10::OperatorName& op) {
  return op.overload_name.empty() ? op.name : op.name + '.' + op.overload_name;
}

// ---- Rules that an extra carries out ------------------------------------------------------------

/// What becomes of the calls in a region whose policy has an OpRule. Shared by the threads that
/// take over the region's state.
class OpRuleUsage {
 public:
  virtual ~OpRuleUsage() = default;
  /// An op with an overlay is called that the rule does not reach.
  virtual void passed_by(const c10::OperatorName& op) = 0;
  /// At the region's end.
  virtual void warn_if_unused() const = 0;
};

/// How an extra carries out a rule of a policy by itself, options included: products in fp8
/// (torchamp/fp8.h). The table points to it and knows no more. Immutable.
class OpRule {
 public:
  virtual ~OpRule() = default;

  /// Before a 16-bit region of a device whose policy has the rule. Error, of `call`: the region
  /// cannot follow a rule that it has to.
  virtual void prepare(const char* call, const PolicyData& policy, at::DeviceType device,
                       at::ScalarType dtype) const = 0;
  /// Runs a call: takes the arguments off the stack and leaves the result. False if it cannot: the
  /// stack is as it was. Autocast is off. `usage` may be null.
  virtual bool run(const c10::OperatorHandle& op, at::DeviceType device, torch::jit::Stack& stack,
                   OpRuleUsage* usage) const = 0;
  /// Why an overload cannot follow the rule; empty if it can.
  virtual std::string why_not_op(std::string_view full_name) const = 0;
  /// As in a policy's text: "fp8(recipe=rowwise strict)". Rules with one text are the same.
  virtual std::string text() const = 0;
  /// For a new region; `outer`: of the region around it, or null.
  virtual std::shared_ptr<OpRuleUsage> make_usage(
      const std::shared_ptr<OpRuleUsage>& outer) const = 0;
};

/// The rule of Cast::fp8 without options, which torchamp/fp8.h registers; null where no source file
/// includes that.
using MakeOpRule = std::shared_ptr<const OpRule> (*)();
inline MakeOpRule fp8_rule_maker = nullptr;

// ---- A policy's contents ------------------------------------------------------------------------

enum class BaseTable : std::uint8_t { standard, torch };

/// One call of an edit, as the user wrote it.
struct Edit {
  Cast cast;
  std::vector<std::string> names;
  std::string family;  // instead of `names`, if not empty
  When when;
  std::shared_ptr<const OpRule> op_rule = nullptr;  // of the rule fp8, and not null then
};

// Rules that only tables have.
/// fp32 in regions of a dtype that the device has no recurrent layers in, native in others: see
/// Note [Recurrent layers].
inline constexpr Cast fp32_where_lacking = static_cast<Cast>(0x81);
/// fp32 where the op's value does not fit into what it fills: see Note [What LibTorch refuses].
inline constexpr Cast fp32_where_it_must = static_cast<Cast>(0x82);

/// The rules of one overload: one that always holds, if there is one, and on top of it those of
/// edits that hold only sometimes (their indices, in the order in which they were given).
struct OverloadRules {
  bool has_cast = false;  // whether an edit has set `cast`
  Cast cast = Cast::native;
  std::vector<std::size_t> conditional = {};
  std::size_t edit = 0;  // that set `cast`
};

/// By the overload's name: "aten::pow.Tensor_Scalar".
using RuleMap = std::map<std::string, OverloadRules, std::less<>>;

// Note [A choice is told once]
// A predicate is called once for each call of its op, and only the overlay knows what it said. For
// whoever records (a CastRecorder, LibTorch's profiler) the overlay opens and closes an empty user
// scope of this name and the rule's within the op. Without a recorder that is one look at a flag.
inline constexpr std::string_view choice_scope = "torchamp rule: ";
/// So does a call under the rule fp8, with nothing behind the name if it ran in fp8, else with why
/// it did not.
inline constexpr std::string_view fp8_scope = "torchamp fp8: ";

inline void announce(std::string_view kind, std::string_view what) {
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    at::RecordFunction scope(std::move(*callbacks));
    scope.before(std::string(kind).append(what));
  }
}

/// What an overlay does to a call.
struct OverlayRule {
  Cast cast = Cast::native;
  const OpRule* op_rule = nullptr;  // of Cast::fp8, and not null then
  bool is_chosen = false;           // for this call, by a condition
};

/// A policy's rules for one overlay.
struct OverlayEntry : OverlayRule {
  /// Indices of PolicyData::edits that hold only sometimes, tried first. Null if there are none and
  /// the rule itself holds always. Lives as long as PolicyData::rules.
  const std::vector<std::size_t>* conditional = nullptr;
};

/// By an overlay's index. One that came after the table is one that its policy did not ask for:
/// LibTorch's own rule.
using OverlayTable = std::vector<OverlayEntry>;

/// The contents of a Policy: a base table and edits. Immutable once shared.
class PolicyData {
 public:
  explicit PolicyData(BaseTable base_table) : base(base_table) {}
  /// A copy to edit; it starts without compiled tables.
  PolicyData(const PolicyData& other) : base(other.base), edits(other.edits), rules(other.rules) {}
  PolicyData& operator=(const PolicyData&) = delete;

  /// What the edits made of one overload; null if they do not reach it.
  const OverloadRules* edited(const c10::OperatorHandle& op) const {
    if (rules.empty()) return nullptr;
    const auto found = rules.find(full_name(op.operator_name()));
    return found == rules.end() ? nullptr : &found->second;
  }

  /// Whether edit `index`, one with a condition, still lies on some overload.
  bool has_conditional(std::size_t index) const {
    for (const auto& [op, of_op] : rules) {
      for (const std::size_t conditional : of_op.conditional) {
        if (conditional == index) return true;
      }
    }
    return false;
  }

  /// An edit's OpRule, which later ones may have replaced; null if there is none.
  const OpRule* op_rule() const {
    for (const Edit& edit : edits) {
      if (edit.op_rule != nullptr) return edit.op_rule.get();
    }
    return nullptr;
  }

  /// Has `compile` make the table for a device, if it has not been made. Any thread.
  template <class Compile>
  void compile_once(std::size_t device_index, const Compile& compile) const {
    Compiled& compiled = compiled_[device_index];
    if (compiled.ready.load(std::memory_order_acquire)) return;
    const std::scoped_lock lock(mutex_);
    if (compiled.ready.load(std::memory_order_relaxed)) return;
    compiled.table = compile();
    compiled.ready.store(true, std::memory_order_release);
  }

  /// The rule of overlay `overlay` on a device, whose table has been made, for one call.
  OverlayRule rule(std::size_t device_index, std::size_t overlay, at::DeviceType device,
                   const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> stack) const;

  BaseTable base;
  std::vector<Edit> edits;
  RuleMap rules;  // what the edits made of each overload that they reached

 private:
  struct Compiled {
    std::atomic<bool> ready = false;
    OverlayTable table;
  };
  mutable std::mutex mutex_;
  mutable std::array<Compiled, device_count> compiled_;
};

/// The contents of Policy::standard() and Policy::torch(), which all copies share.
inline const std::shared_ptr<const PolicyData>& unedited(BaseTable base) {
  // Never destroyed: static objects' destructors may use guards.
  static const auto& tables = *new std::array<std::shared_ptr<const PolicyData>, 2>{
      std::make_shared<PolicyData>(BaseTable::standard),
      std::make_shared<PolicyData>(BaseTable::torch)};
  return tables[static_cast<std::size_t>(base)];
}

// ---- What is in force on a thread ---------------------------------------------------------------

/// What guards do whatever they are given: those of the process as the environment variable
/// TORCHAMP_POLICY says, or those of a thread for the time of an extra's trial.
struct GuardOverride {
  virtual ~GuardOverride() = default;

  /// The dtype of a guard that is made now, and asks for `asked` and to be `enabled` or not.
  virtual at::ScalarType dtype_of_guard(at::DeviceType /*on*/, at::ScalarType asked,
                                        bool /*enabled*/) const {
    return asked;
  }

  bool off = false;                          ///< guards run disabled
  std::shared_ptr<const PolicyData> policy;  ///< in place of any other; or null
  bool module_policies = false;              ///< whether those of modules hold all the same
};

/// What a guard puts into the thread's slot. Immutable: LibTorch shares it with other threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard that names no policy
  /// By device, with its table compiled; null outside guards and where they are disabled.
  std::array<std::shared_ptr<const PolicyData>, device_count> in_force;
  bool is_in_guard = false;
  WeightKeep keep;                              // of what is made of weights
  const WeightCasts* casts = nullptr;           // of weights; null: LibTorch's
  std::shared_ptr<OpRuleUsage> op_rule_usage;   // of the innermost region with an OpRule
  std::shared_ptr<const GuardOverride> guards;  // of the guards inside; null but for a trial
  /// The backward pass, by autograd's number, in which a scope put it in force; else none. See
  /// Note [Sums of gradients].
  int backward_pass = no_backward_pass;
  /// Of which it is a copy, made for the backward pass; null outside of one.
  std::shared_ptr<const ThreadPolicy> outside;

  static constexpr int no_backward_pass = -1;
};

/// A copy to change, for a scope inside of the policy's, if there is one.
inline std::shared_ptr<ThreadPolicy> copy_of(const ThreadPolicy* policy) {
  auto copy = std::make_shared<ThreadPolicy>();
  if (policy != nullptr) *copy = *policy;
  copy->backward_pass = ThreadPolicy::no_backward_pass;
  copy->outside = nullptr;
  return copy;
}

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

// Note [Sums of gradients]
// If a tensor was used twice, autograd adds its two gradients by `add`, between the nodes of the
// graph, and passes the sum to the next node, whose kernels accept only the gradients' dtype. A
// backward pass that began in a region runs in its state, so the policy sees these additions, which
// cannot be told from a node's own. But a forward pass within backward (a recomputation, a custom
// function) has its own scope: so scopes that begin in a backward pass record its number, and
// additions in the pass outside these are left to LibTorch, as are sums of AccumulateGrad and of
// hooks.

/// The number of the backward pass that the calling thread works for, or no_backward_pass.
inline int this_backward_pass() {
  return torch::autograd::get_current_graph_task_id();
}

/// Whether autograd adds up gradients by this op.
inline bool adds_gradients(const c10::OperatorName& op) {
  return op.name == "aten::add" && op.overload_name == "Tensor";
}

/// Whether what is added now is left to LibTorch: see Note [Sums of gradients].
inline bool leaves_sums_alone(const ThreadPolicy& policy) {
  const int pass = this_backward_pass();
  return pass != ThreadPolicy::no_backward_pass && pass != policy.backward_pass;
}

}  // namespace torchamp::detail
