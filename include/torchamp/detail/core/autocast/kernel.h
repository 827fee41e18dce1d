// SPDX-License-Identifier: BSD-3-Clause
// What an overlay does to a call, and which overlays a policy needs.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/overflows.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/ops.h"

#if TORCHAMP_LIBTORCH < 209
/// LibTorch befriends all classes of this template, and no other that could ask for a kernel.
template <>
class c10::TypedOperatorHandle<struct TorchampKernelLookup> {
 public:
  static const KernelFunction& kernel(const OperatorHandle& op, DispatchKey key) {
    return op.operatorDef_->op.lookup(DispatchKeySet(key));
  }
};
#endif

namespace torchamp::detail {

// ---- The casts of one call ----------------------------------------------------------------------

/// Arguments, each followed by a copy that an op writes to instead.
using StandIns = std::vector<at::Tensor>;

/// Brings what the op has written to where it belongs.
inline void copy_back(const StandIns& stand_ins) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < stand_ins.size(); i += 2) stand_ins[i].copy_(stand_ins[i + 1]);
}

/// Casts the arguments of one op on the interpreter's stack. Made once per op, from its schema.
class CastArguments {
 public:
  /// `promotes`: the op itself computes in the widest dtype of its arguments, as additions do.
  CastArguments(const c10::FunctionSchema& schema, bool promotes)
      : count_(schema.arguments().size()), promotes_(promotes) {
    const auto& arguments = schema.arguments();
    const bool has_statistics =
        std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
          return is_running_statistic(argument) && holds_tensors(*argument.type());
        });
    for (std::size_t i = 0; i < count_; ++i) {
      const c10::Argument& argument = arguments[i];
      const std::string& name = argument.name();
      if (is_dtype(argument, /*optional=*/true)) dtype_position_ = i;
      if (argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
          argument.type()->kind() == c10::TypeKind::TensorType) {
        written_position_ = i;
      }
      if (name == "weight" && schema.name() == "aten::instance_norm") unit_weight_position_ = i;
      if (name == "training" || name == "use_input_stats") training_position_ = i;
      if (!holds_tensors(*argument.type())) continue;
      const bool is_beside = has_statistics && (name == "weight" || name == "bias");
      auto& positions = is_running_statistic(argument) ? statistics_
                        : is_beside                    ? beside_statistics_
                                                       : positions_;
      positions.push_back(i);
    }
  }

  /// Casts as `cast` says for a region of `device`. After the op has run, the stand-ins are to be
  /// copied back. `casts`: who casts weights to 16 bits, if not LibTorch.
  [[nodiscard]] StandIns operator()(Cast cast, at::DeviceType device, const WeightCasts* casts,
                                    const c10::FunctionSchema& schema,
                                    torch::jit::Stack& stack) const {
    const Call call{device, stack.data() + (stack.size() - count_)};
    const auto narrow = [&](Dtype dtype) {
      if (casts && dtype && is_16_bit(*dtype)) {
        casts->cast(schema, positions_, *dtype, device, stack);
      }
      return to(dtype, call);
    };
    switch (cast) {
      case Cast::lower_precision:
      case Cast::fp8:  // where it cannot be
        if (device == at::kCPU && is_sparse(call)) return to(at::kFloat, call);
        return narrow(at::autocast::get_autocast_dtype(device));
      case Cast::promote:
        return written_position_ ? narrow(dtype_written_to(call)) : to(widest(call), call);
      case Cast::fp32:
        if (dtype_position_ && can_ask_for_fp32(call)) return {};
        if (promotes_ && widen_one(call)) return {};
        return to(at::kFloat, call);
      case Cast::native:
      case Cast::unchanged:
        break;
    }
    if (cast == fp32_where_it_must && must_be_fp32(call)) return to(at::kFloat, call);
    return {};
  }

 private:
  using Dtype = std::optional<at::ScalarType>;
  using Positions = std::vector<std::size_t>;

  /// A call in a region of a device.
  struct Call {
    at::DeviceType device;
    c10::IValue* arguments;

    c10::IValue& operator[](std::size_t position) const { return arguments[position]; }
    bool can_cast(const at::Tensor& tensor) const {
      return tensor.defined() && at::autocast::is_eligible(tensor, device);
    }
  };

  /// The widest dtype among `dtype` and the castable tensors at `positions`; nothing if there are
  /// none.
  static Dtype widest_of(Dtype dtype, const Positions& positions, const Call& call) {
    for (const std::size_t position : positions) {
      for_each_tensor_of(call[position], [&](const at::Tensor& tensor) {
        if (!call.can_cast(tensor)) return;
        dtype = dtype ? c10::promoteTypes(*dtype, tensor.scalar_type()) : tensor.scalar_type();
      });
    }
    return dtype;
  }

  /// Whether an argument is a sparse matrix, for which a CPU has no 16-bit products.
  bool is_sparse(const Call& call) const {
    bool is_one = false;
    for (const std::size_t position : positions_) {
      for_each_tensor_of(call[position], [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        is_one = is_one || (tensor.layout() != at::kStrided && tensor.layout() != at::kMkldnn);
      });
    }
    return is_one;
  }

  Dtype widest(const Call& call) const {
    const Dtype dtype = widest_of(std::nullopt, positions_, call);
    return widest_of(widest_of(dtype, beside_statistics_, call), statistics_, call);
  }

  /// That of the tensor which the op writes to, if it can be computed in.
  Dtype dtype_written_to(const Call& call) const {
    const c10::IValue& value = call[*written_position_];
    if (!value.isTensor() || !value.toTensor().is_floating_point()) return std::nullopt;
    return value.toTensor().scalar_type();
  }

  /// Of an op with the rule fp32_where_it_must: masked_fill, or else rrelu.
  bool must_be_fp32(const Call& call) const {
    if (!training_position_) return !value_fits(call);
    return call[0].toTensor().scalar_type() == at::kHalf && call[*training_position_].toBool();
  }

  /// Whether the number at the end of the arguments fits into the dtype of the first.
  bool value_fits(const Call& call) const {
    const at::ScalarType dtype = call[0].toTensor().scalar_type();
    const c10::IValue& value = call[count_ - 1];
    if (!is_16_bit(dtype) || !(value.isDouble() || value.isInt())) return true;
    const double number = value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
    return dtype == at::kHalf ? !c10::overflows<c10::Half>(number)
                              : !c10::overflows<c10::BFloat16>(number);
  }

  // Note [Casts of running statistics]
  // Statistics in fp32 that were cast to 16 bits would lose what an update adds, so they are never
  // narrowed. Where an op needs them wider than they are (`fp32` on a model in 16 bits) it is given
  // a copy, which is copied back if the op has updated it. LibTorch's kernels take weight and bias
  // in the dtype of the statistics and in no other. Its instance_norm narrows statistics by itself
  // where there is no weight, so it is given one of ones.
  StandIns cast_statistics(at::ScalarType dtype, const Call& call) const {
    StandIns stand_ins;
    const at::ScalarType wide = *widest_of(dtype, statistics_, call);
    for (const std::size_t position : beside_statistics_) cast_value(wide, call, position);
    if (unit_weight_position_ && wide != dtype) {
      c10::IValue& weight = call[*unit_weight_position_];
      const c10::IValue& statistic = call[statistics_.front()];
      const bool has_weight = weight.isTensor() && weight.toTensor().defined();
      if (!has_weight && statistic.isTensor() && statistic.toTensor().defined()) {
        weight = at::ones_like(statistic.toTensor());
      }
    }
    const c10::IValue& training = call[training_position_.value_or(0)];
    const bool updates = !training_position_ || !training.isBool() || training.toBool();
    for (const std::size_t position : statistics_) {
      c10::IValue& value = call[position];
      if (!value.isTensor() || !needs_cast(value.toTensor(), wide, call)) continue;
      const at::Tensor original = value.toTensor();
      value = original.to(wide);
      if (!updates) continue;
      stand_ins.push_back(original);
      stand_ins.push_back(value.toTensor());
    }
    return stand_ins;
  }

  StandIns to(Dtype dtype, const Call& call) const {
    if (!dtype) return {};
    for (const std::size_t position : positions_) cast_value(*dtype, call, position);
    return statistics_.empty() ? StandIns() : cast_statistics(*dtype, call);
  }

  static void cast_value(at::ScalarType dtype, const Call& call, std::size_t position) {
    c10::IValue& value = call[position];
    if (value.isTensor()) {
      if (!needs_cast(value.toTensor(), dtype, call)) return;
      value = at::autocast::cached_cast(dtype, value.toTensor(), call.device);
    } else if (value.isList()) {
      cast_list(dtype, call, value);
    }
  }

  static void cast_list(at::ScalarType dtype, const Call& call, c10::IValue& value) {
    c10::impl::GenericList list = value.toList().copy();  // keeps the type of its elements
    for (std::size_t i = 0; i < list.size(); ++i) {
      const c10::IValue& element = list.get(i);
      if (!element.isTensor()) continue;
      list.set(i, at::autocast::cached_cast(dtype, element.toTensor(), call.device));
    }
    value = list;
  }

  static bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype, const Call& call) {
    return call.can_cast(tensor) && tensor.scalar_type() != dtype;
  }

  // LibTorch's rule for `fp32_set_opt_dtype`: a dtype that the caller gave stands. False if the
  // arguments must be cast instead: a tensor that is never cast would be converted, too, and ops on
  // nested tensors take no dtype.
  bool can_ask_for_fp32(const Call& call) const {
    c10::IValue& dtype = call[*dtype_position_];
    if (!dtype.isNone()) return true;
    bool castable = false, all_can_be_asked = true;
    for (const std::size_t position : positions_) {
      for_each_tensor_of(call[position], [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        const bool can_cast = call.can_cast(tensor);
        castable = castable || can_cast;
        if (can_cast ? tensor.is_nested() : tensor.is_floating_point() || tensor.is_complex()) {
          all_can_be_asked = false;
        }
      });
    }
    if (castable && all_can_be_asked) dtype = at::kFloat;
    return all_can_be_asked;
  }

  // Note [One cast for an addition]
  // An op with type promotion computes in fp32 as soon as one argument that decides the dtype is
  // fp32, and converts the other on the fly. Tensors with dimensions decide over those without. So
  // one cast serves for two arguments. Kernels of sparse layouts do not all convert: false.
  bool widen_one(const Call& call) const {
    c10::IValue* chosen = nullptr;
    bool chosen_has_dims = false, wide = false;
    for (const std::size_t position : positions_) {
      c10::IValue& value = call[position];
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const at::Tensor& tensor = value.toTensor();
      if (tensor.layout() != at::kStrided) return false;
      if (!tensor.is_floating_point()) continue;
      const bool has_dims = tensor.dim() > 0;
      if (chosen && has_dims < chosen_has_dims) continue;
      if (!chosen || has_dims > chosen_has_dims) {
        chosen = &value;
        chosen_has_dims = has_dims;
        wide = false;
      }
      wide = wide || tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
    }
    if (chosen && !wide) {
      *chosen = at::autocast::cached_cast(at::kFloat, chosen->toTensor(), call.device);
    }
    return true;
  }

  Positions positions_;          // of the arguments that hold tensors
  Positions statistics_;         // of running statistics; not in positions_
  Positions beside_statistics_;  // of their weight and bias; not in positions_
  std::optional<std::size_t> dtype_position_;
  std::optional<std::size_t> training_position_;  // of what says whether statistics are updated
  std::optional<std::size_t> written_position_;
  std::optional<std::size_t> unit_weight_position_;  // of instance_norm's weight
  std::size_t count_;
  bool promotes_;
};

// ---- What LibTorch says of some ops -------------------------------------------------------------

/// In LibTorch's warning that the weights of a recurrent layer are scattered: see
/// Note [Recurrent layers].
inline constexpr const char* scattered_weights = "not part of single contiguous chunk";

/// Drops the calling thread's warnings that have `text`, and passes on all others, while it lives.
class NoWarning final : public c10::WarningHandler {
 public:
  explicit NoWarning(const char* text) : text_(text) {}
  void process(const c10::Warning& warning) override {
    if (warning.msg().find(text_) == std::string::npos) outer_->process(warning);
  }

 private:
  const char* text_;
  c10::WarningHandler* outer_ = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// Note [Binary cross entropy]
// binary_cross_entropy takes probabilities, in general a sigmoid's. In 16 bits a sigmoid rounds to
// 1 from about 8.3 on in fp16 and 6.2 in bf16, and in fp16 to 0 below about -17. The gradient of
// such an element is lost in the sigmoid, whatever the loss itself is computed in. That is why
// LibTorch's CUDA kernel for autocast refuses the op, also where the sigmoid is in fp32; a CPU has
// no ban. Policy::standard() computes the op in fp32 on every device, and warns once if its input
// is in 16 bits, that is, has been rounded already. Policy::torch() keeps the ban.

/// Warns once, from the dtype of the op's first argument. Reads no device.
inline void warn_of_16_bit_probabilities(const c10::OperatorHandle& op,
                                         const torch::jit::Stack& stack) {
  const c10::IValue& input = stack[stack.size() - op.schema().arguments().size()];
  if (!input.isTensor() || !input.toTensor().defined()) return;
  const at::ScalarType dtype = input.toTensor().scalar_type();
  if (!is_16_bit(dtype)) return;
  static std::atomic<bool> is_known = false;
  warn_once(
      is_known,
      {"torchamp: binary_cross_entropy was given probabilities in ", c10::toString(dtype),
       ". The loss is computed in fp32, but a sigmoid in 16 bits has already rounded those that "
       "are close to 0 or 1, whose gradients are then lost. Use binary_cross_entropy_with_logits, "
       "or compute the sigmoid in fp32 (torch::sigmoid(logits.to(torch::kFloat)), or "
       "Policy::fp32(\"sigmoid\"))."});
}

// ---- Overlays -----------------------------------------------------------------------------------

/// An op's kernel, to be called by callBoxed().
#if TORCHAMP_LIBTORCH >= 209
using NativeKernel = c10::SafeKernelFunction;
inline NativeKernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.getComputedKernelForDispatchKey(key);
}
#else
using NativeKernel = c10::KernelFunction;
inline NativeKernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return c10::TypedOperatorHandle<TorchampKernelLookup>::kernel(op, key);
}
#endif

/// Whether LibTorch's own kernel for the device casts the op's arguments to 16 bits.
inline bool lowers_natively(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) && why_not_castable(op.schema()).empty() &&
         kernel_lowers(op.operator_name(), device);
}

// Note [Overlays]
// An overlay is a boxed kernel for one op under one device's autocast key. It is registered at most
// once per process, when the first policy that disagrees with LibTorch about that op comes into
// force, and asks the calling thread's policy on every call. Without a torchamp guard, or where the
// policy has no rule for the op, it calls the autocast kernel that it covers, or, where there was
// none, passes the call on to the next key with autocast still on, as the fallthrough did. So code
// that uses at::autocast without torchamp sees no change.
//
// LibTorch does not lock its dispatch table against calls. Registration is safe beside threads that
// call ops outside autocast, but not beside threads that call the same op inside it.
//
// Note [TorchScript]
// LibTorch's JIT rewrites a script that runs with autocast on: it puts a cast op
// (aten::_autocast_to_reduced_precision or _full_precision) before ops on lists of its own. The
// dispatcher, and so the policy, still sees every op; overlays make these casts no-ops wherever a
// torchamp guard is in force on the thread. Scripts then follow the policy exactly as C++ does,
// whichever state they were first run in, while other threads keep the JIT's casts.
class Overlay final : public c10::OperatorKernel {
 public:
  Overlay(const c10::OperatorHandle& op, std::size_t index, at::DeviceType device)
      : index_(index),
        device_(device),
        device_index_(device_index(device, "Overlay")),
        key_(autocast_key(device)),
        after_(c10::DispatchKeySet::FULL_AFTER, key_),
        argument_count_(op.schema().arguments().size()),
        adds_gradients_(adds_gradients(op.operator_name())),
        is_script_cast_(op.operator_name().name.starts_with("aten::_autocast_to_")) {
    if (has_autocast_kernel(op, device)) native_.emplace(kernel_of(op, key_));
  }
  ~Overlay() override { delete facts_.load(std::memory_order_relaxed); }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    const ThreadPolicy* const of_thread = thread_policy();
    const PolicyData* const policy = of_thread ? of_thread->in_force[device_index_].get() : nullptr;
    if (policy == nullptr || (adds_gradients_ && leaves_sums_alone(*of_thread))) {
      return call_native(op, keys, stack);
    }
    if (is_script_cast_) return torch::jit::drop(*stack, argument_count_ - 1);  // leaves `self`
    const OverlayRule rule = policy->rule(device_index_, index_, device_, op, *stack);
    if (OpRuleUsage* const usage = of_thread->op_rule_usage.get(); usage || rule.op_rule) {
      if (follow_op_rule(*policy, rule, usage, op, *stack)) return;
    }
    const Facts* const facts = facts_of_op(op);
    const WeightCasts* const casts = casts_of_weights(*of_thread, rule, facts);
    const Cast cast = casts && rule.cast == Cast::native ? Cast::lower_precision : rule.cast;
    if (cast == Cast::native) return call_native(op, keys, stack);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    const StandIns stand_ins = cast_arguments(facts, cast, casts, op, *stack);
    std::optional<NoWarning> no_warning;
    if (cast != Cast::unchanged && facts->is_recurrent_layer) no_warning.emplace(scattered_weights);
    op.redispatchBoxed(keys & after_, stack);
    if (!stand_ins.empty()) copy_back(stand_ins);
  }

 private:
  /// What a call needs to know of its op. The first call finds it out: most are never called.
  struct Facts {
    Facts(const c10::OperatorHandle& op, at::DeviceType device)
        : cast_arguments(op.schema(), contains(ops::addition, op.operator_name())),
          takes_probabilities(contains(probability_loss, op.operator_name())),
          is_recurrent_layer(contains(recurrent_layer, op.operator_name())),
          is_natively_lowered(lowers_natively(op, device)) {}

    CastArguments cast_arguments;
    bool takes_probabilities;
    bool is_recurrent_layer;
    bool is_natively_lowered;
  };

  /// Null of an op that has not the arguments that it had when the overlay was made.
  const Facts* facts_of_op(const c10::OperatorHandle& op) const {
    const Facts* const known = facts_.load(std::memory_order_acquire);
    return known || op.schema().arguments().size() != argument_count_ ? known : find_facts(op);
  }

  const Facts* find_facts(const c10::OperatorHandle& op) const {
    const Facts* known = nullptr;
    auto made = std::make_unique<const Facts>(op, device_);
    const bool is_first = facts_.compare_exchange_strong(known, made.get());
    return is_first ? made.release() : known;
  }

  [[noreturn]] static void refuse(const c10::OperatorName& op) {
    fail({"torchamp: '", full_name(op),
          "' was registered again with other arguments, but policies keep its first schema. Give "
          "the new op another name."});
  }

  void call_native(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) const {
    if (native_) {
      native_->callBoxed(op, keys, stack);
    } else {
      op.redispatchBoxed(keys & after_, stack);
    }
  }

  /// Lets the OpRule of the call's rule run it, if there is one and it can.
  bool follow_op_rule(const PolicyData& policy, const OverlayRule& rule, OpRuleUsage* usage,
                      const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
    if (rule.op_rule != nullptr) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
      return rule.op_rule->run(op, device_, stack, usage);
    }
    if (policy.op_rule() != nullptr) usage->passed_by(op.operator_name());
    return false;
  }

  /// Who casts the call's weights to 16 bits, if not LibTorch.
  static const WeightCasts* casts_of_weights(const ThreadPolicy& of_thread, const OverlayRule& rule,
                                             const Facts* facts) {
    if (of_thread.casts == nullptr) return nullptr;
    const bool is_native = rule.cast == Cast::native && !rule.is_chosen && facts != nullptr &&
                           facts->is_natively_lowered;
    const bool may_narrow =
        rule.cast == Cast::lower_precision || rule.cast == Cast::fp8 || rule.cast == Cast::promote;
    return is_native || may_narrow ? of_thread.casts : nullptr;
  }

  StandIns cast_arguments(const Facts* facts, Cast cast, const WeightCasts* casts,
                          const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
    if (cast == Cast::unchanged) return {};
    const std::size_t count = op.schema().arguments().size();
    if (facts == nullptr || count != argument_count_) refuse(op.operator_name());
    if (facts->takes_probabilities && cast == Cast::fp32) warn_of_16_bit_probabilities(op, stack);
    return facts->cast_arguments(cast, device_, casts, op.schema(), stack);
  }

  std::optional<NativeKernel> native_;  // which it covers, if there is one
  std::size_t index_;
  at::DeviceType device_;
  std::size_t device_index_;
  c10::DispatchKey key_;
  c10::DispatchKeySet after_;
  std::size_t argument_count_;
  bool adds_gradients_;
  bool is_script_cast_;  // whether the JIT casts by this op
  mutable std::atomic<const Facts*> facts_ = nullptr;
};

/// Makes sure that the op has its overlay for the device, and returns its index in the tables.
inline std::size_t install_overlay(const c10::OperatorHandle& op, at::DeviceType device) {
  SharedRuntime& runtime = shared_runtime();
  auto& overlays = runtime.overlays[device_index(device, "install_overlay")];
  const std::scoped_lock lock(runtime.mutex);
  const std::size_t index = overlays.size();
  const auto [overlay, is_new] = overlays.try_emplace(
      op.operator_name(), KnownOverlay{index, has_autocast_kernel(op, device)});
  if (!is_new) return overlay->second.index;
  try {
    const NoWarning of_any_text("");  // LibTorch warns of kernels that replace others
    // Never destroyed: its end would take the kernel away. (A torch::Library would parse the name,
    // which takes longer than all else that the first guard does for an op.)
    new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
        op.operator_name(), autocast_key(device),
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Overlay>(op, index, device)),
        std::nullopt, nullptr, "torchamp kernel"));
  } catch (...) {
    overlays.erase(overlay);
    throw;
  }
  return index;
}

inline void PolicyData::compile(at::DeviceType device) const {
  Compiled& compiled = compiled_[device_index(device, "Policy")];
  const std::scoped_lock lock(mutex_);
  if (compiled.ready.load(std::memory_order_relaxed)) return;
  for (const char* name : {"_autocast_to_reduced_precision", "_autocast_to_full_precision"}) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
      (void)install_overlay(op, device);
    }
  }
  OverlayTable table;
  for_each_candidate(*this, [&](const TabledOp& tabled) {
    const OverlayEntry entry = overlay_entry(*this, tabled, device);
    if (entry.cast == Cast::native && entry.conditional == nullptr) return;
    const std::size_t index = install_overlay(tabled.op, device);
    if (index >= table.size()) table.resize(index + 1);
    table[index] = entry;
  });
  compiled.table = std::move(table);
  compiled.ready.store(true, std::memory_order_release);
}

}  // namespace torchamp::detail
