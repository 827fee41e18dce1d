// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/policy/special_ops.h"
#include "torchamp/detail/text.h"

namespace torchamp::detail {

enum class BaseTable : std::uint8_t { standard, torch };

/// One call of an edit, as the user wrote it.
struct Edit {
  Cast cast;
  std::vector<std::string> names;
  std::string family;  // instead of `names`, if not empty
  When when;
  std::shared_ptr<const OpRule> op_rule = nullptr;  // of the rule fp8, and not null then
};

// Note [A choice is told once]
// A predicate is called once for each call of its op, and only the overlay knows what it said. For
// whoever records (a CastRecorder, LibTorch's profiler) the overlay opens and closes an empty user
// scope of this name and the rule's within the op. Without a recorder that is one look at a flag.
inline constexpr std::string_view choice_scope = "torchamp rule: ";

inline void announce(std::string_view kind, std::string_view what) {
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    at::RecordFunction scope(std::move(*callbacks));
    scope.before(std::string(kind).append(what));
  }
}

inline void announce_choice(Cast cast) {
  announce(choice_scope, to_string(cast));
}

/// So does a call under the rule fp8, with nothing behind the name if it ran in fp8, else with why
/// it did not.
inline constexpr std::string_view fp8_scope = "torchamp fp8: ";

/// fp32 where the op's value does not fit into what it fills. Only tables have it.
inline constexpr Cast fp32_where_it_must = static_cast<Cast>(0x82);

/// A policy's rules for the overlays of one device, by the overlays' index.
class OverlayTable {
 public:
  struct Rule {
    Cast cast = Cast::native;
    const Edit* edit = nullptr;  // of Cast::fp8, and not null then
    bool is_chosen = false;      // for this call, by a condition
  };
  struct Entry : Rule {
    /// Indices of PolicyData::edits that hold only sometimes, tried first. Null if there are none
    /// and the rule itself holds always. Lives as long as PolicyData::rules.
    const std::vector<std::size_t>* conditional = nullptr;
  };

  /// The entry of overlay `index`. An overlay that came after this table is one that its policy did
  /// not ask for: LibTorch's own rule.
  Entry operator[](std::size_t index) const {
    return index < entries_.size() ? entries_[index] : Entry();
  }

  void set(std::size_t index, Entry entry) {
    if (index >= entries_.size()) entries_.resize(index + 1);
    entries_[index] = entry;
  }

  /// By the policy's edits: why the device cannot follow their OpRule; empty if it can.
  std::vector<std::string> refusals;

 private:
  std::vector<Entry> entries_;
};

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

  /// Whether an edit of the policy's still lies on some overload.
  bool is_in_force(const Edit& edit) const {
    const auto index = static_cast<std::size_t>(&edit - edits.data());
    for (const auto& [op, of_op] : rules) {
      if (of_op.has_cast && of_op.edit == index) return true;
    }
    return has_conditional(index);
  }

  BaseTable base;
  std::vector<Edit> edits;
  RuleMap rules;  // what the edits made of each overload that they reached

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
  OverlayTable::Rule rule(std::size_t device_index, std::size_t overlay, at::DeviceType device,
                          const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> stack) const {
    const OverlayTable::Entry entry = compiled_[device_index].table[overlay];
    if (entry.conditional == nullptr) return entry;
    OverlayTable::Rule rule = choose(entry, device, OpCall(op.schema(), stack));
    if (rule.cast == fp32_where_lacking) {
      const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
      rule.cast = has_recurrent_layers(device, dtype) ? Cast::native : Cast::fp32;
      if (rule.cast == Cast::fp32) warn_of_recurrent_layers_in_fp32(dtype);
    }
    announce_choice(rule.cast == fp32_where_it_must ? Cast::fp32 : rule.cast);
    rule.is_chosen = true;
    return rule;
  }

  /// An edit's OpRule, which later ones may have replaced; null if there is none.
  const OpRule* op_rule() const {
    for (const Edit& edit : edits) {
      if (edit.op_rule != nullptr) return edit.op_rule.get();
    }
    return nullptr;
  }

  /// Why a strict OpRule cannot be followed in a region of a device, whose table has been made, and
  /// a dtype; empty if it can, or if there is none.
  std::string strict_refusal(std::size_t device_index, at::DeviceType device,
                             at::ScalarType dtype) const {
    for (const Edit& edit : edits) {
      if (edit.op_rule == nullptr || !edit.op_rule->is_strict()) continue;
      if (edit.when.dtype.value_or(dtype) != dtype || !is_in_force(edit)) continue;
      if (const std::string& why = refusal(device_index, edit); !why.empty()) return why;
      std::string why = edit.op_rule->why_not_in(device, dtype);
      if (!why.empty()) return why;
    }
    return {};
  }

  /// Why an edit's OpRule cannot be followed on a device, whose table has been made; empty if it
  /// can.
  const std::string& refusal(std::size_t device_index, const Edit& edit) const {
    return compiled_[device_index].table.refusals[static_cast<std::size_t>(&edit - edits.data())];
  }

  /// The rules of overlay `overlay` on a device, whose table has been made.
  OverlayTable::Entry rules_of_overlay(std::size_t device_index, std::size_t overlay) const {
    return compiled_[device_index].table[overlay];
  }

 private:
  OverlayTable::Rule choose(const OverlayTable::Entry& entry, at::DeviceType device,
                            const OpCall& call) const {
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    for (std::size_t i = entry.conditional->size(); i-- > 0;) {  // the last that holds wins
      const Edit& edit = edits[(*entry.conditional)[i]];
      if (holds(edit.when, dtype, call))
        return {.cast = edit.cast, .edit = edit.op_rule == nullptr ? nullptr : &edit};
    }
    return entry;
  }

  static bool holds(const When& when, at::ScalarType dtype, const OpCall& call) {
    if (!when.predicate) return when.holds(dtype, call);
    // A predicate may call ops, its own among them, and these are no part of the op.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::DisableRecordFunctionGuard not_recorded;
    return when.holds(dtype, call);
  }

  struct Compiled {
    std::atomic<bool> ready = false;
    OverlayTable table;
  };
  mutable std::mutex mutex_;
  mutable std::array<Compiled, device_count> compiled_;
};

/// The contents of Policy::standard() and Policy::torch(), which all copies share.
inline const std::shared_ptr<const PolicyData>& unedited(BaseTable base) {
  using Shared = std::shared_ptr<const PolicyData>;
  // Never destroyed: static objects' destructors may use guards.
  static const auto& standard = *new Shared(new PolicyData(BaseTable::standard));
  static const auto& torch = *new Shared(new PolicyData(BaseTable::torch));
  return base == BaseTable::standard ? standard : torch;
}

/// Whether two edits are known to be the same. Predicates cannot be compared.
inline bool is_same(const Edit& a, const Edit& b) {
  return a.cast == b.cast && a.names == b.names && a.family == b.family &&
         a.when.dtype == b.when.dtype && !a.when.predicate && !b.when.predicate &&
         (a.op_rule == nullptr || a.op_rule->text() == b.op_rule->text());
}

/// Whether two policies are known to have the same rules.
inline bool is_same(const PolicyData& one, const PolicyData& other) {
  if (&one == &other) return true;
  if (one.base != other.base || one.edits.size() != other.edits.size()) return false;
  for (std::size_t i = 0; i < one.edits.size(); ++i) {
    if (!is_same(one.edits[i], other.edits[i])) return false;
  }
  return true;
}

}  // namespace torchamp::detail
