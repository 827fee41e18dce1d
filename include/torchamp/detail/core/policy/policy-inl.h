// SPDX-License-Identifier: BSD-3-Clause
// From the names in an edit to the table of a device.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <tuple>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/data.h"
#include "torchamp/policy.h"

namespace torchamp::detail {

// ---- Ops by name --------------------------------------------------------------------------------

/// The ops that are registered at the moment: LibTorch tells it of every op that comes or goes. A
/// table with chains, as these are some 3400 within the first guard, which a standard container
/// would make half as long again.
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
      found.push_back(op.handle);
      const auto name = [&](std::size_t i) -> const std::string& {
        return found[i].operator_name().overload_name;
      };
      for (std::size_t i = found.size() - 1; i > 0 && name(i) < name(i - 1); --i) {
        std::swap(found[i], found[i - 1]);
      }
    }
    return found;
  }

  /// The known name nearest to `base` in its namespace; empty if nothing is known there. Of several
  /// as near, the one in most families, and of these the first by name.
  std::string nearest(std::string_view base) {
    const std::scoped_lock lock(mutex_);
    const std::string_view space = base.substr(0, base.find("::") + 2);
    std::pair<std::int64_t, std::string_view> best;
    for (const Op& op : ops_) {
      if (op.is_gone || !op.name().name.starts_with(space)) continue;
      auto rank = static_cast<std::int64_t>(32 * edit_distance(base, op.name().name));
      for (const OpFamily& family : ops::families) rank -= contains(family, op.name());
      const std::pair one(rank, std::string_view(op.name().name));
      if (best.second.empty() || one < best) best = one;
    }
    return std::string(best.second);
  }

  // LibTorch calls these one at a time, and the first of them for all ops within make(), where a
  // lock for each would make a process's first guard 7 % slower.
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

  std::mutex mutex_;
  const std::thread::id maker_ = std::this_thread::get_id();
  bool is_made_ = false;
  std::vector<Op> ops_;
  std::uint32_t first_[1 << 12] = {};  // by hash
};

TORCHAMP_COLD std::vector<c10::OperatorHandle> find_ops(std::string_view text,
                                                        std::string_view call, bool missing_ok) {
  const auto colons = text.find("::");
  const auto dot = text.find('.', colons == text.npos ? 0 : colons);
  const std::string_view name = text.substr(0, dot);
  const std::string base = std::string(colons == text.npos ? "aten::" : "").append(name);
  std::vector<c10::OperatorHandle> found = OpCatalog::instance().overloads(base);
  if (dot == text.npos && (missing_ok || !found.empty())) return found;
  const std::string_view wanted = dot == text.npos ? "" : text.substr(dot + 1);
  std::string known;
  for (const c10::OperatorHandle& op : found) {
    const std::string& overload = op.operator_name().overload_name;
    if (overload == wanted) return {op};
    known.append(known.empty() ? "'" : ", '").append(name);
    known.append(overload.empty() ? "" : ".").append(overload).append("'");
  }
  if (missing_ok) return {};
  if (!found.empty()) {
    fail({call, ": the op '", base, "' has no overload '", shorten(wanted), "'. It has ", known,
          "."});
  }
  std::string nearest = OpCatalog::instance().nearest(base);
  if (nearest.starts_with("aten::")) nearest.erase(0, 6);
  const bool is_alone = nearest.empty();
  fail({call, ": LibTorch knows no op '", shorten(text),
        is_alone ? "', nor any other in its namespace. First load the library that registers it. "
                   "LibTorch's own ops have no namespace: 'softmax'."
                 : "'. Did you mean '",
        nearest, is_alone ? "" : "'?"});
}

// ---- What an op's arguments are -----------------------------------------------------------------

TORCHAMP_COLD std::string_view why_not_castable(const c10::FunctionSchema& schema) {
  constexpr std::string_view writes =
      "it writes to an argument (an in-place or out= form), which a cast would replace by a copy";
  const std::string_view name = schema.name();
  if (schema.is_mutable() || (name.ends_with('_') && !name.ends_with("__"))) return writes;
  bool has_tensors = false, names_dtype = false;
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

// ---- Lists --------------------------------------------------------------------------------------

TORCHAMP_BODY const StandardRow* standard_row(const c10::OperatorName& op) {
  const std::string_view base = base_of(op);
  if (base.empty()) return nullptr;
  for (const StandardRow& row : standard_rows) {
    for (const std::string_view name : row.family) {  // "mm" or "mm.out"
      if (name.front() != base.front() || !name.starts_with(base)) continue;
      const std::string_view rest = name.substr(base.size());
      if (rest.empty() || (rest[0] == '.' && rest.substr(1) == op.overload_name)) return &row;
    }
  }
  return nullptr;
}

TORCHAMP_COLD Cast kernel_rule(const c10::OperatorName& op, at::DeviceType device) {
  if (kernel_lowers(op, device)) return Cast::lower_precision;
  if (facts_of(device).follows_cuda_lists) return listed_cast(op);
  if (is_among(cpu_fp32_ops, base_of(op))) return Cast::fp32;
  return is_among(cpu_promote_ops, base_of(op)) ? Cast::promote : Cast::native;
}

// ---- Recurrent layers ---------------------------------------------------------------------------

// Note [Recurrent layers]
// On CUDA, lstm, gru, rnn_tanh and rnn_relu end in _cudnn_rnn, whose autocast kernel casts to fp16
// whatever the region's dtype is. So where CUDA's lists are followed, Policy::standard() casts the
// layers' own arguments. The casts of the weights then do not lie in one piece of memory as cuDNN
// wants them: each call puts them together, with a warning, which is dropped.
//
// On a CPU an LSTM ends in oneDNN's, whose autocast kernel throws where oneDNN has none in the
// region's dtype (bf16 takes avx512, fp16 avx512_fp16 or AMX). So there Policy::standard() runs the
// layers in fp32, all four by one rule: the others are made of products, which such a CPU is slow
// in. ONEDNN_MAX_CPU_ISA and other settings also decide whether oneDNN makes an LSTM; so one of one
// cell is tried.

/// Runs an LSTM on a CPU under LibTorch's autocast in `dtype`, forward and backward. In a thread of
/// its own, where nothing of the caller's state is in force.
inline void run_lstm_on_cpu(at::ScalarType dtype, bool* runs) try {
  const at::DisableRecordFunctionGuard not_recorded;
  at::autocast::set_autocast_cache_enabled(false);  // all threads share it
  at::autocast::set_autocast_dtype(at::kCPU, dtype);
  const at::Tensor cell = at::zeros({1, 1, 1}, at::kFloat);
  const at::Tensor weight = at::zeros({4, 1}, at::kFloat).requires_grad_();
  const at::Tensor bias = at::zeros({4}, at::kFloat).requires_grad_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto result = at::lstm(cell, {cell, cell}, {weight, weight, bias, bias},
                               /*has_biases=*/true, /*num_layers=*/1, /*dropout=*/0.,
                               /*train=*/true, /*bidirectional=*/false, /*batch_first=*/false);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  std::get<0>(result).sum().backward();
  *runs = true;
} catch (...) {  // oneDNN's errors are none of LibTorch's
}

inline bool autocast_runs_lstm_on_cpu(at::ScalarType dtype) {
  bool runs = false;
  std::thread(run_lstm_on_cpu, dtype, &runs).join();
  return runs;
}

/// Whether a device has recurrent layers in `dtype`, fp16 or bf16; only CPUs may lack them, and
/// none while oneDNN is switched off. The first call for a CPU and a dtype tries. Any thread.
inline bool has_recurrent_layers(at::DeviceType device, at::ScalarType dtype) {
  if (device != at::kCPU || !at::globalContext().userEnabledMkldnn()) return true;
  if (dtype == at::kBFloat16) {
    static const bool bf16 = autocast_runs_lstm_on_cpu(at::kBFloat16);
    return bf16;
  }
  static const bool fp16 = autocast_runs_lstm_on_cpu(at::kHalf);
  return fp16;
}

inline void warn_of_recurrent_layers_in_fp32(at::ScalarType dtype) {
  static std::atomic<bool> is_known = false;
  warn_once(
      is_known,
      {"torchamp: this CPU has no LSTM in ", c10::toString(dtype),
       " (oneDNN has none for its instructions), so LSTMs, GRUs and RNNs run in fp32 here under "
       "Policy::standard(). Policy::effect tells of a layer; Policy::fp32(ops::recurrent) says "
       "the same without this warning, and under Policy::torch() an LSTM throws."});
}

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
  if (rule.cast == fp32_where_lacking) {
    rule.cast = has_recurrent_layers(device, dtype) ? Cast::native : Cast::fp32;
    if (rule.cast == Cast::fp32) warn_of_recurrent_layers_in_fp32(dtype);
  }
  announce(choice_scope, to_string(rule.cast == fp32_where_it_must ? Cast::fp32 : rule.cast));
  rule.is_chosen = true;
  return rule;
}

// ---- The rule in force for an op ----------------------------------------------------------------

TORCHAMP_COLD TabledOp::TabledOp(c10::OperatorHandle overload, const StandardRow* row)
    : op(std::move(overload)) {
  if (row == nullptr) row = standard_row(op.operator_name());
  const StandardRule rule =
      row != nullptr ? row->rule
                     : StandardRule{.cast = listed_cast(op.operator_name()), .unless_native = true};
  if (rule.writes || why_not_castable(op.schema()).empty()) standard = rule;
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
  } else if (cast == fp32_where_lacking) {
    entry.conditional = &no_edits;
  }
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

TORCHAMP_COLD Cast Policy::common_rule(const char* call, std::string_view op, at::DeviceType device,
                                       bool in_effect) const {
  (void)detail::device_index(device, call);
  const auto overloads = detail::find_ops(op, call);
  const auto rule_of = in_effect ? &detail::effect_of_rule : &detail::rule_in_force;
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
    listing += detail::joined({listing.empty() ? "" : ", ", overload.operator_name().overload_name,
                               ": ", to_string(cast)});
  }
  TORCHAMP_CHECK(agree, call, ": the overloads of '", op, "' follow different rules (", listing,
                 "). Name one, as '", op, ".", overloads.front().operator_name().overload_name,
                 "'.");
  return common;
}

}  // namespace TORCHAMP_NAMESPACE
