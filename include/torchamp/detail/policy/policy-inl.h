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
  [[gnu::cold]] std::vector<c10::OperatorHandle> overloads(std::string_view base) {
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
  [[gnu::cold]] std::string nearest(std::string_view base) {
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

  [[gnu::cold]] static OpCatalog& make() {
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

  /// Of a name's hash: of its end, and of what follows "aten::". std::hash takes ten times as long.
  std::uint32_t& first_of(std::string_view name) {
    std::uint64_t words[2] = {};
    if (name.size() < sizeof words[0]) return first_[0];
    const std::size_t last = name.size() - sizeof words[0];
    std::memcpy(&words[0], name.data() + last, sizeof words[0]);
    std::memcpy(&words[1], name.data() + std::min<std::size_t>(last, 6), sizeof words[1]);
    const std::uint64_t hash = (words[0] * 3 + words[1] + name.size()) * 0x9E3779B97F4A7C15u;
    return first_[hash >> 52];
  }

  const std::thread::id maker_ = std::this_thread::get_id();
  bool is_made_ = false;
  std::mutex mutex_;
  std::vector<Op> ops_;
  std::uint32_t first_[1 << 12] = {};  // by hash
};

TORCHAMP_COLD std::vector<c10::OperatorHandle> find_ops(std::string_view text,
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

TORCHAMP_COLD bool holds_tensors(const c10::Type& type) {
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

TORCHAMP_COLD bool is_dtype(const c10::Argument& argument, bool optional) {
  if (argument.name() != "dtype"sv) return false;
  const c10::Type* type = argument.real_type().get();
  const bool is_optional = type->kind() == c10::TypeKind::OptionalType;
  if (is_optional) type = type->castRaw<c10::OptionalType>()->getElementType().get();
  return is_optional == optional && type->kind() == c10::TypeKind::ScalarTypeType;
}

TORCHAMP_COLD bool takes_named_dimensions(const c10::FunctionSchema& schema) {
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

TORCHAMP_COLD bool is_running_statistic(const c10::Argument& argument) {
  return argument.name().starts_with("running_") || argument.name().starts_with("moving_");
}

TORCHAMP_COLD std::string_view why_not_castable(const c10::FunctionSchema& schema) {
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

TORCHAMP_COLD bool has_autocast_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  const c10::DispatchKey key = autocast_key(device);
  return op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key);
}

TORCHAMP_COLD bool has_native_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  if (!has_autocast_kernel(op, device)) return false;
  SharedRuntime& runtime = shared_runtime();
  const auto& overlays = runtime.overlays[device_index(device, "has_native_kernel")];
  const std::scoped_lock lock(runtime.mutex);
  const auto overlay = overlays.find(op.operator_name());
  return overlay == overlays.end() || overlay->second.has_native;
}

// ---- Lists --------------------------------------------------------------------------------------

/// "add" of "aten::add"; empty for ops that are not LibTorch's.
inline std::string_view base_of(const c10::OperatorName& op) {
  const std::string_view name = op.name;
  return name.starts_with("aten::") ? name.substr(6) : std::string_view();
}

TORCHAMP_BODY bool contains(const OpFamily& family, const c10::OperatorName& op) {
  return std::find(family.begin(), family.end(), base_of(op)) != family.end();
}

TORCHAMP_BODY const StandardRow* standard_row(const c10::OperatorName& op) {
  const std::string_view base = base_of(op);
  if (base.empty()) return nullptr;
  const auto is_it = [&](std::string_view name) {  // "mm" or "mm.out"
    return name.front() == base.front() && name.starts_with(base) &&
           (name.size() == base.size() ||
            (name[base.size()] == '.' && name.substr(base.size() + 1) == op.overload_name));
  };
  for (const StandardRow& row : standard_rows) {
    if (std::any_of(row.family.begin(), row.family.end(), is_it)) return &row;
  }
  return nullptr;
}

TORCHAMP_BODY Cast listed_cast(const c10::OperatorName& op) {
  const std::string_view base = base_of(op);
  for (const ListedRule& rule : libtorch_cuda_lists) {
    if (rule.op() == base && rule.overload() == op.overload_name) return rule.cast;
  }
  return Cast::native;
}

TORCHAMP_COLD Cast kernel_rule(const c10::OperatorName& op, at::DeviceType device) {
  const std::string_view base = base_of(op);
  const auto has = [&](const auto& list) {
    return std::find(std::begin(list), std::end(list), base) != std::end(list);
  };
  if (facts_of(device).lists == OpLists::cuda) {
    return has(cuda_lower_precision_ops) ? Cast::lower_precision : listed_cast(op);
  }
  if (has(cpu_lower_precision_ops)) return Cast::lower_precision;
  if (has(cpu_fp32_ops)) return Cast::fp32;
  return has(cpu_promote_ops) ? Cast::promote : Cast::native;
}

// ---- The rule in force for an op ----------------------------------------------------------------

/// What the standard table says of an op.
[[gnu::cold]] inline StandardRule standard_rule(const c10::OperatorName& op) {
  const StandardRow* const row = standard_row(op);
  return row != nullptr ? row->rule : StandardRule{.cast = listed_cast(op), .unless_native = true};
}

TORCHAMP_COLD TabledOp::TabledOp(const c10::OperatorHandle& overload, const StandardRule& rule)
    : op(overload) {
  if (rule.writes || why_not_castable(op.schema()).empty()) standard = rule;
}

TORCHAMP_COLD TabledOp::TabledOp(const c10::OperatorHandle& overload)
    : TabledOp(overload, standard_rule(overload.operator_name())) {}

/// The rule of a base table for one overload, before any edit. Of those that only tables have, too.
[[gnu::cold]] inline Cast base_rule(BaseTable base, const TabledOp& of, at::DeviceType device) {
  const StandardRule& rule = of.standard;
  const bool holds = base == BaseTable::standard && rule.cast != Cast::native;
  if (holds && !rule.unless_native) {
    return facts_of(device).lists == OpLists::cuda ? rule.cast : rule.cast_on_cpu;
  }
  if (has_native_kernel(of.op, device)) return Cast::native;
  return holds ? rule.cast : Cast::unchanged;
}

/// The rule for one overload, conditional rules left out. `edited`: what the policy's edits made of
/// it, or null. Of those that only tables have, too.
[[gnu::cold]] inline Cast tabled_rule(const PolicyData& policy, const OverloadRules* edited,
                                      const TabledOp& op, at::DeviceType device) {
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

TORCHAMP_COLD Cast effect_of_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                                  at::DeviceType device) {
  const Cast cast = rule_in_force(policy, op, device);
  return cast == Cast::native ? kernel_rule(op.operator_name(), device) : cast;
}

TORCHAMP_COLD OverlayEntry overlay_entry(const PolicyData& policy, const TabledOp& of,
                                         at::DeviceType device) {
  static const auto& no_edits = *new std::vector<std::size_t>;  // never destroyed
  OverlayEntry entry;
  const OverloadRules* const edited = policy.edited(of.op);
  const Cast cast = tabled_rule(policy, edited, of, device);
  if (cast == Cast::unchanged) {
    // To stay unchanged an op must be shielded if it has an autocast kernel, or calls ops that may.
    const bool is_edited = edited != nullptr && edited->has_cast && edited->cast == cast;
    if (is_edited && (has_native_kernel(of.op, device) ||
                      of.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))) {
      entry.cast = cast;
    }
  } else if (facts_of(device).lists != OpLists::cuda || !has_native_kernel(of.op, device) ||
             listed_cast(of.op.operator_name()) != cast) {
    // Not left to LibTorch's kernel, which is known to do the same only if it follows these lists.
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

TORCHAMP_COLD std::vector<TabledOp> candidates(const PolicyData& policy) {
  std::vector<TabledOp> candidates;
  candidates.reserve(1024);
  const auto add = [&](const TabledOp& tabled) {
    if (tabled.standard.cast != Cast::native) candidates.push_back(tabled);
  };
  if (policy.base == BaseTable::standard) {
    for (const StandardRow& row : standard_rows) {
      for (const std::string_view name : row.family) {
        for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
          add(TabledOp(op, row.rule));
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
      candidates.emplace_back(op);
    }
  }
  return candidates;
}

// ---- Edits --------------------------------------------------------------------------------------

/// The overloads that an edit, called `call`, reaches with the name `name`. `op_rule`: of the rule
/// fp8.
[[gnu::cold]] inline std::vector<c10::OperatorHandle> overloads_to_edit(const std::string& call,
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

TORCHAMP_COLD void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
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

TORCHAMP_COLD Policy Policy::standard() {
  return Policy(detail::unedited(detail::BaseTable::standard));
}

TORCHAMP_COLD Policy Policy::torch() {
  return Policy(detail::unedited(detail::BaseTable::torch));
}

TORCHAMP_COLD Policy& Policy::edit(Cast rule, const OpNames& ops, const When& when,
                                   std::shared_ptr<const detail::OpRule> op_rule) {
  auto edited = std::make_shared<detail::PolicyData>(*data_);
  detail::add_edit(*edited, rule, ops, when, std::move(op_rule));
  if (edited->edits.size() != data_->edits.size()) data_ = std::move(edited);
  return *this;
}

TORCHAMP_COLD Cast Policy::lookup(std::string_view op, at::DeviceType device) const {
  return common_rule("Policy::lookup", &detail::rule_in_force, op, device);
}

TORCHAMP_COLD Cast Policy::effect(std::string_view op, at::DeviceType device) const {
  return common_rule("Policy::effect", &detail::effect_of_rule, op, device);
}

TORCHAMP_COLD Cast Policy::common_rule(const char* call, RuleOf rule_of, std::string_view op,
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
