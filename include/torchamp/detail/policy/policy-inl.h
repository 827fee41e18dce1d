// SPDX-License-Identifier: BSD-3-Clause
// From the names in an edit to the table of a device.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/special_ops.h"
#include "torchamp/detail/text.h"
#include "torchamp/ops.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// ---- Ops by name --------------------------------------------------------------------------------

/// The ops that are registered at the moment. LibTorch tells it of every op that comes or goes, so
/// that it needs no look at all of them; LibTorch's own lists keep the names of ops that have gone.
/// A table with chains, as LibTorch tells of some 3400 ops within the first guard: a standard
/// container would make that half as long again.
class OpCatalog final : public c10::OpRegistrationListener {
 public:
  /// Never destroyed: ops go until the process ends.
  static OpCatalog& instance() {
    static OpCatalog& catalog = make();
    return catalog;
  }

  /// The overloads of "aten::add", by their names: none if the op is unknown. Any thread.
  std::vector<c10::OperatorHandle> overloads(std::string_view base) {
    const std::scoped_lock lock(mutex_);
    std::vector<c10::OperatorHandle> found;
    found.reserve(8);
    for (std::size_t at = first_of(base); at != 0; at = ops_[at - 1].next) {
      const Op& op = ops_[at - 1];
      if (op.is_gone || op.name().name != base) continue;
      std::size_t place = found.size();
      found.push_back(op.handle);
      // std::sort takes longer to compile than the rest of this.
      for (; place > 0 && is_before(found[place], found[place - 1]); --place) {
        std::swap(found[place], found[place - 1]);
      }
    }
    return found;
  }

  /// The known name nearest to `base` in its namespace; empty if nothing is known there. Of several
  /// as near, the one in most families, and of these the first by name.
  std::string nearest(std::string_view base) {
    const std::scoped_lock lock(mutex_);
    const std::string space(base.substr(0, base.find("::") + 2));
    const auto families_of = [](const std::string& name) {
      return std::count_if(std::begin(ops::families), std::end(ops::families),
                           [&](const OpFamily& family) {
                             return contains(family, {name, ""});
                           });
    };
    std::string best;
    std::size_t best_distance = std::numeric_limits<std::size_t>::max();
    for (const Op& op : ops_) {
      if (op.is_gone || !op.name().name.starts_with(space)) continue;
      const std::string& name = op.name().name;
      const std::size_t distance = edit_distance(base, name);
      if (distance > best_distance) continue;
      if (distance == best_distance) {
        const auto more = families_of(name) - families_of(best);
        if (more < 0 || (more == 0 && name >= best)) continue;
      }
      best_distance = distance;
      best = name;
    }
    return best;
  }

  // LibTorch calls these one at a time, and the first of them for all ops within make().
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (std::this_thread::get_id() != maker_ || is_made_) lock.lock();
    std::uint32_t& first = first_of(op.operator_name().name);
    ops_.push_back({op, first});
    first = static_cast<std::uint32_t>(ops_.size());
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const std::scoped_lock lock(mutex_);
    const c10::OperatorName& name = op.operator_name();
    for (std::size_t at = first_of(name.name); at != 0; at = ops_[at - 1].next) {
      if (!ops_[at - 1].is_gone && &ops_[at - 1].name() == &name) ops_[at - 1].is_gone = true;
    }
  }

 private:
  struct Op {
    c10::OperatorHandle handle;
    std::uint32_t next;    // the next one whose name has that hash, from 1; 0 is none
    bool is_gone = false;  // the handle leads nowhere then

    const c10::OperatorName& name() const { return handle.operator_name(); }
  };

  static OpCatalog& make() {
    pin_this_library();
    auto& catalog = *new OpCatalog;
    std::unique_ptr<c10::OpRegistrationListener> listener(&catalog);
    catalog.ops_.reserve(4096);
    // Its end would take the listener away.
    new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::move(listener)));
    const std::scoped_lock lock(catalog.mutex_);
    catalog.is_made_ = true;
    return catalog;
  }

  static bool is_before(const c10::OperatorHandle& a, const c10::OperatorHandle& b) {
    return a.operator_name().overload_name < b.operator_name().overload_name;
  }

  /// Of a name's hash. std::hash takes three times as long.
  std::uint32_t& first_of(std::string_view name) {
    constexpr std::size_t word_size = sizeof(std::uint64_t);
    std::uint64_t hash = name.size();
    const auto mix = [&](std::size_t at, std::size_t size) {
      std::uint64_t word = 0;
      std::memcpy(&word, name.data() + at, size);
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    };
    for (std::size_t at = 0; at + word_size < name.size(); at += word_size) mix(at, word_size);
    const std::size_t rest = std::min(name.size(), word_size);
    mix(name.size() - rest, rest);
    return first_[hash % std::size(first_)];
  }

  const std::thread::id maker_ = std::this_thread::get_id();
  bool is_made_ = false;
  std::mutex mutex_;
  std::vector<Op> ops_;
  std::uint32_t first_[4096] = {};  // by hash
};

TORCHAMP_BODY std::vector<c10::OperatorHandle> find_ops(std::string_view text,
                                                        std::string_view call, bool missing_ok) {
  // "softmax", "softmax.int", "mylib::op" or "mylib::op.overload"
  const auto colons = text.find("::");
  const bool has_space = colons != text.npos;
  const auto dot = std::min(text.find('.', has_space ? colons : 0), text.size());
  const std::string base = std::string(has_space ? "" : "aten::").append(text.substr(0, dot));
  std::vector<c10::OperatorHandle> found = OpCatalog::instance().overloads(base);
  if (found.empty()) {
    if (missing_ok) return found;
    std::string nearest = OpCatalog::instance().nearest(base);
    TORCH_CHECK(!nearest.empty(), call, ": LibTorch knows no op '", shorten(text),
                "', nor any other of its namespace. Load the library that registers it first. "
                "LibTorch's own ops are named without one: 'softmax'.");
    if (nearest.starts_with("aten::")) nearest.erase(0, 6);
    TORCH_CHECK(false, call, ": LibTorch knows no op '", shorten(text), "'. Did you mean '",
                nearest, "'?");
  }
  if (dot == text.size()) return found;
  const std::string_view overload = text.substr(dot + 1);
  std::string known;
  for (const c10::OperatorHandle& op : found) {
    const c10::OperatorName& name = op.operator_name();
    if (name.overload_name == overload) return {op};
    known.append(known.empty() ? "'" : ", '").append(text.substr(0, dot));
    known += (name.overload_name.empty() ? "" : '.' + name.overload_name) + "'";
  }
  TORCH_CHECK(missing_ok, call, ": the op '", base, "' has no overload '", shorten(overload),
              "'. It has ", known, ".");
  return {};
}

// ---- What an op's arguments are -----------------------------------------------------------------

TORCHAMP_BODY bool holds_tensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return true;
    case c10::TypeKind::OptionalType:
      return holds_tensors(*type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType: {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      return element.kind() != c10::TypeKind::ListType && holds_tensors(element);
    }
    default:
      return false;
  }
}

TORCHAMP_BODY bool is_dtype(const c10::Argument& argument, bool optional) {
  if (argument.name() != "dtype"sv) return false;
  const c10::Type* type = argument.real_type().get();
  const bool is_optional = type->kind() == c10::TypeKind::OptionalType;
  if (is_optional) type = type->castRaw<c10::OptionalType>()->getElementType().get();
  return is_optional == optional && type->kind() == c10::TypeKind::ScalarTypeType;
}

TORCHAMP_BODY bool takes_named_dimensions(const c10::FunctionSchema& schema) {
  const std::string_view overload = schema.overload_name();
  return overload.find("name"sv) != overload.npos &&
         (overload.find("imname"sv) != overload.npos || overload.find("names"sv) != overload.npos);
}

// Note [Ops that write to what they do not declare]
// A schema marks what its op writes to (`Tensor(a!)`), but not every op keeps to that. Known, and
// looked for in every schema of the running LibTorch by tests/policy/undeclared_writes_test.cpp:
//  - Batch and instance norms update their running statistics, which an op need not have. These
//    ops can be cast, and their statistics are seen to by CastArguments.
//  - Ops whose name ends in an underscore write in place (c10d's collectives), those that return
//    nothing have no other way to have an effect, `dst` is what a copy goes to, and `qaccum` is
//    what oneDNN's fused convolutions add to. None of these can be cast.

TORCHAMP_BODY bool is_running_statistic(const c10::Argument& argument) {
  return argument.name().starts_with("running_") || argument.name().starts_with("moving_");
}

TORCHAMP_BODY std::string_view why_not_castable(const c10::FunctionSchema& schema) {
  constexpr std::string_view writes =
      "it writes to an argument (an in-place or out= form), which a cast would replace by a copy";
  const std::string_view name = schema.name();
  if (schema.is_mutable() || (name.ends_with('_') && !name.ends_with("__"))) return writes;
  bool has_tensors = false;
  bool names_dtype = false;
  for (const auto& argument : schema.arguments()) {
    if (argument.name() == "dst"sv || argument.name() == "qaccum"sv) return writes;
    has_tensors = has_tensors || holds_tensors(*argument.type());
    names_dtype = names_dtype || is_dtype(argument, /*optional=*/false);
  }
  if (!has_tensors) return "it takes no tensors";
  if (schema.returns().empty()) {
    return "it returns nothing, so what it does it does to its arguments, which a cast would "
           "replace by copies";
  }
  if (takes_named_dimensions(schema)) return "it takes named dimensions";
  if (names_dtype) return "the caller names its dtype";
  for (const auto& result : schema.returns()) {
    if (result.alias_info()) return "it returns a view of its argument, which a cast would cut off";
  }
  return {};
}

TORCHAMP_BODY bool has_autocast_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  const c10::DispatchKey key = autocast_key(device);
  return op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key);
}

TORCHAMP_BODY bool has_native_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  if (!has_autocast_kernel(op, device)) return false;
  SharedRuntime& runtime = shared_runtime();
  const auto& overlays = runtime.overlays[device_index(device, "has_native_kernel")];
  const std::scoped_lock lock(runtime.mutex);
  const auto overlay = overlays.index_of.find(full_name(op.operator_name()));
  return overlay == overlays.index_of.end() || overlays.has_native[overlay->second];
}

// ---- Lists --------------------------------------------------------------------------------------

TORCHAMP_BODY bool contains(const OpFamily& family, const c10::OperatorName& op) {
  if (!op.name.starts_with("aten::")) return false;
  return std::find(family.begin(), family.end(), std::string_view(op.name).substr(6)) !=
         family.end();
}

/// Listed rules in the order in which they came, and where each is by its name. Never destroyed.
struct RuleList {
  std::vector<ListedRule> rules;
  std::unordered_map<std::string, std::size_t> index_of;

  RuleList() { index_of.reserve(256); }

  /// In place of one of that name, if there is one.
  void set(std::string op, Cast cast, const StandardRow* row) {
    const auto [place, is_new] = index_of.try_emplace(std::move(op), rules.size());
    const ListedRule rule{place->first, cast, row};
    is_new ? rules.push_back(rule) : void(rules[place->second] = rule);
  }
  /// Null if there is none.
  const ListedRule* find(const std::string& op) const {
    const auto found = index_of.find(op);
    return found == index_of.end() ? nullptr : &rules[found->second];
  }
};

TORCHAMP_BODY const StandardRow* standard_row(const c10::OperatorName& op) {
  static const RuleList& rows = [&]() -> RuleList& {
    auto& list = *new RuleList;
    for (const StandardRow& row : standard_rows) {
      for (const std::string_view name : row.family) {
        list.set(std::string("aten::").append(name), row.cast, &row);
      }
    }
    return list;
  }();
  const ListedRule* listed = rows.find(op.name);
  if (listed == nullptr && !op.overload_name.empty()) listed = rows.find(full_name(op));
  return listed == nullptr ? nullptr : listed->row;
}

// "pow, Tensor_Scalar" -> "aten::pow.Tensor_Scalar"
inline std::string listed_name(std::string_view entry) {
  const auto comma = entry.find(',');
  std::string name = "aten::" + std::string(entry.substr(0, comma));
  if (comma != std::string_view::npos) {
    name += '.' + std::string(entry.substr(entry.find_first_not_of(' ', comma + 1)));
  }
  return name;
}

inline const RuleList& libtorch_cuda_rules() {
  static const RuleList& lists = []() -> RuleList& {
    auto& made = *new RuleList;
    const auto add = [&](const char* entry, Cast cast) {
      made.set(listed_name(entry), cast, /*row=*/nullptr);
    };
#define TORCHAMP_LOWER(...) add(#__VA_ARGS__, Cast::lower_precision);
#define TORCHAMP_FP32(...) add(#__VA_ARGS__, Cast::fp32);
#define TORCHAMP_PROMOTE(...) add(#__VA_ARGS__, Cast::promote);
#define TORCHAMP_APPEND_DTYPE(function, name, ...) add(name, Cast::fp32);
    AT_FORALL_LOWER_PRECISION_FP(TORCHAMP_LOWER)
    AT_FORALL_FP32(TORCHAMP_FP32)
    AT_FORALL_FP32_SET_OPT_DTYPE(TORCHAMP_FP32)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(TORCHAMP_APPEND_DTYPE)
    AT_FORALL_PROMOTE(TORCHAMP_PROMOTE)
#undef TORCHAMP_LOWER
#undef TORCHAMP_FP32
#undef TORCHAMP_PROMOTE
#undef TORCHAMP_APPEND_DTYPE
    return made;
  }();
  return lists;
}

TORCHAMP_BODY const std::vector<ListedRule>& libtorch_cuda_lists() {
  return libtorch_cuda_rules().rules;
}

TORCHAMP_BODY const ListedRule* listed_rule(const std::string& full_name) {
  return libtorch_cuda_rules().find(full_name);
}

/// Its cast; native if there is none.
inline Cast listed_cast(const std::string& full_name) {
  const ListedRule* const listed = listed_rule(full_name);
  return listed == nullptr ? Cast::native : listed->cast;
}

TORCHAMP_BODY Cast kernel_rule(const std::string& full_name, at::DeviceType device) {
  if (!full_name.starts_with("aten::")) return Cast::native;
  const std::string_view base = std::string_view(full_name).substr(6, full_name.find('.') - 6);
  const auto has = [&](const auto& list) {
    return std::find(std::begin(list), std::end(list), base) != std::end(list);
  };
  if (facts_of(device).lists == OpLists::cuda) {
    return has(cuda_lower_precision_ops) ? Cast::lower_precision : listed_cast(full_name);
  }
  if (has(cpu_lower_precision_ops)) return Cast::lower_precision;
  if (has(cpu_fp32_ops)) return Cast::fp32;
  return has(cpu_promote_ops) ? Cast::promote : Cast::native;
}

// ---- The rule in force for an op ----------------------------------------------------------------

/// The rule of a base table for one overload, before any edit. Of those that only tables have, too.
inline Cast base_rule(BaseTable base, const c10::OperatorHandle& op, at::DeviceType device) {
  const auto is_castable = [&] { return why_not_castable(op.schema()).empty(); };
  const StandardRow* const row =
      base == BaseTable::standard ? standard_row(op.operator_name()) : nullptr;
  const bool row_holds = row != nullptr && (row->writes || is_castable());
  if (row_holds && !row->unless_native) {
    return facts_of(device).lists == OpLists::cuda ? row->cast : row->cast_on_cpu;
  }
  if (has_native_kernel(op, device)) return Cast::native;
  if (row_holds) return row->cast;
  if (base == BaseTable::torch) return Cast::unchanged;
  const Cast listed = listed_cast(full_name(op.operator_name()));
  return listed != Cast::native && is_castable() ? listed : Cast::unchanged;
}

/// The rule for one overload, conditional rules left out. `edited`: what the policy's edits made of
/// it, or null. Of those that only tables have, too.
inline Cast tabled_rule(const PolicyData& policy, const OverloadRules* edited,
                        const c10::OperatorHandle& op, at::DeviceType device) {
  if (edited == nullptr || !edited->has_cast) return base_rule(policy.base, op, device);
  return edited->cast == Cast::native ? base_rule(BaseTable::torch, op, device) : edited->cast;
}

TORCHAMP_BODY Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op,
                                 at::DeviceType device) {
  const Cast cast = tabled_rule(policy, policy.edited(op), op, device);
  if (cast == fp32_where_it_must) return Cast::fp32;
  if (cast != fp32_where_lacking) return cast;
  return has_recurrent_layers(device, at::autocast::get_autocast_dtype(device))
             ? base_rule(BaseTable::torch, op, device)
             : Cast::fp32;
}

TORCHAMP_BODY Cast effect_of_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                                  at::DeviceType device) {
  const Cast cast = rule_in_force(policy, op, device);
  return cast == Cast::native ? kernel_rule(full_name(op.operator_name()), device) : cast;
}

/// Whether LibTorch's own kernel for the device is known to follow `cast`. Only the lists that the
/// devices share with CUDA can be read; a CPU's kernels cannot, so none is known to.
inline bool native_agrees(const c10::OperatorHandle& op, at::DeviceType device, Cast cast) {
  return facts_of(device).lists == OpLists::cuda && has_native_kernel(op, device) &&
         listed_cast(full_name(op.operator_name())) == cast;
}

/// Whether an op must be shielded to stay unchanged: it has an autocast kernel, or calls ops that
/// may.
inline bool needs_shield(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

TORCHAMP_BODY OverlayEntry overlay_entry(const PolicyData& policy, const c10::OperatorHandle& op,
                                         at::DeviceType device) {
  static const auto& no_edits = *new std::vector<std::size_t>;  // never destroyed
  OverlayEntry entry;
  const OverloadRules* const edited = policy.edited(op);
  const Cast cast = tabled_rule(policy, edited, op, device);
  if (cast == Cast::unchanged) {
    const bool is_shield = edited != nullptr && edited->has_cast && edited->cast == cast;
    if (is_shield && needs_shield(op, device)) entry.cast = cast;
  } else if (cast != Cast::native && !native_agrees(op, device, cast)) {
    entry.cast = cast;
    if (cast == Cast::fp8) entry.op_rule = policy.edits[edited->edit].op_rule.get();
  }
  if (edited != nullptr && !edited->conditional.empty()) {
    entry.conditional = &edited->conditional;
  } else if (cast == fp32_where_lacking) {
    entry.conditional = &no_edits;
  }
  return entry;
}

TORCHAMP_BODY std::vector<c10::OperatorHandle> candidates(const PolicyData& policy) {
  std::vector<c10::OperatorHandle> candidates;
  candidates.reserve(1024);
  const auto add = [&](std::string_view name, bool only_castable) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
      if (!only_castable || why_not_castable(op.schema()).empty()) candidates.push_back(op);
    }
  };
  if (policy.base == BaseTable::standard) {
    for (const StandardRow& row : standard_rows) {
      for (const std::string_view name : row.family) add(name, !row.writes);
    }
    for (const ListedRule& rule : libtorch_cuda_lists()) add(rule.op, /*only_castable=*/true);
  }
  for (const auto& [name, rules] : policy.rules) add(name, /*only_castable=*/false);
  return candidates;
}

// ---- Edits --------------------------------------------------------------------------------------

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
  for (const auto& op : found) {
    std::string why = op_rule != nullptr ? op_rule->why_not_op(full_name(op.operator_name()))
                                         : std::string(why_not_castable(op.schema()));
    if (why.empty()) {
      castable.push_back(op);
    } else if (reason.empty()) {
      reason = std::move(why);
    }
  }
  const bool fp8 = op_rule != nullptr;
  TORCH_CHECK(!castable.empty() || (missing_ok && (!fp8 || found.empty())), call, ": '", name,
              fp8 ? "' cannot run in fp8: " : "' cannot be cast: ", reason,
              fp8 ? "." : ". Only out-of-place ops with tensor arguments can be.");
  return castable;
}

TORCHAMP_BODY void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
                            std::shared_ptr<const OpRule> op_rule) {
  const CastRow* const row = row_of(rule);
  TORCH_CHECK(row != nullptr, "Policy::set: ", static_cast<int>(rule), " is not a rule of Cast.");
  const std::string call = "Policy::" + std::string(row->name);
  if (rule == Cast::fp8 && op_rule == nullptr) {
    TORCH_CHECK(fp8_rule_maker() != nullptr,
                "Policy::set: the rule fp8 needs torchamp/fp8.h. Include it in some source file.");
    op_rule = fp8_rule_maker()();
  }
  TORCH_CHECK(!when.dtype || is_16_bit(*when.dtype) || *when.dtype == at::kFloat, call,
              ": When::dtype is ", *when.dtype,
              ", but no region has that dtype. Give torch::kHalf, torch::kBFloat16 or, for regions "
              "of CUDA, torch::kFloat.");
  const bool is_family = !ops.family().empty();
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

}  // namespace torchamp::detail

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY Policy Policy::standard() {
  return Policy(detail::unedited(detail::BaseTable::standard));
}

TORCHAMP_BODY Policy Policy::torch() {
  return Policy(detail::unedited(detail::BaseTable::torch));
}

TORCHAMP_BODY Policy& Policy::edit(Cast rule, const OpNames& ops, const When& when,
                                   std::shared_ptr<const detail::OpRule> op_rule) {
  auto edited = std::make_shared<detail::PolicyData>(*data_);
  detail::add_edit(*edited, rule, ops, when, std::move(op_rule));
  if (edited->edits.size() != data_->edits.size()) data_ = std::move(edited);
  return *this;
}

TORCHAMP_BODY Cast Policy::lookup(std::string_view op, at::DeviceType device) const {
  return common_rule("Policy::lookup", &detail::rule_in_force, op, device);
}

TORCHAMP_BODY Cast Policy::effect(std::string_view op, at::DeviceType device) const {
  return common_rule("Policy::effect", &detail::effect_of_rule, op, device);
}

TORCHAMP_BODY Cast Policy::common_rule(const char* call, RuleOf rule_of, std::string_view op,
                                       at::DeviceType device) const {
  (void)detail::device_index(device, call);
  const auto overloads = detail::find_ops(op, call);
  if (overloads.front().operator_name().overload_name.empty() || overloads.size() == 1) {
    return rule_of(*data_, overloads.front(), device);
  }
  Cast common = Cast::unchanged;
  std::string listing;
  bool agree = true;
  for (const auto& overload : overloads) {
    if (!detail::why_not_castable(overload.schema()).empty()) continue;
    const Cast cast = rule_of(*data_, overload, device);
    agree = agree && (listing.empty() || common == cast);
    common = cast;
    (listing += listing.empty() ? "" : ", ")
        .append(overload.operator_name().overload_name)
        .append(": ")
        .append(to_string(cast));
  }
  TORCH_CHECK(agree, call, ": the overloads of '", op, "' follow different rules (", listing,
              "). Name one, as '", op, ".", overloads.front().operator_name().overload_name, "'.");
  return common;
}

}  // namespace TORCHAMP_NAMESPACE
