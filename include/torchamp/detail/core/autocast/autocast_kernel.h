// SPDX-License-Identifier: BSD-3-Clause
// torchamp's kernels under the autocast keys, and which of them a policy needs.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/autocast/cast_arguments.h"
#include "torchamp/detail/core/autocast/op_warnings.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/native_kernel.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The op's kernel under the device's autocast key, if there is one: torchamp's kernel if it is
/// registered, otherwise LibTorch's.
inline std::optional<NativeKernel> registered_kernel(const c10::OperatorHandle& op,
                                                     at::DeviceType device) {
  if (!has_autocast_kernel(op, device)) return std::nullopt;
  return kernel_of(op, autocast_key(device));
}

/// Whether LibTorch's own kernel for the device casts the op's arguments to 16 bits.
inline bool lowers_natively(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) && why_not_castable(op.schema()).empty() &&
         kernel_lowers(op.operator_name(), device);
}

// Note [Autocast kernels]
// An autocast kernel of torchamp is a boxed kernel for one op under one device's autocast key. It
// is registered at most once per process, by the first guard whose policy differs from LibTorch's
// rule for the op. On every call it reads the calling thread's policy. If there is no torchamp
// guard, or the policy has no rule for the op, it calls LibTorch's kernel, which it replaces. If
// LibTorch has no kernel, it passes the call on to the next key with autocast still on, as the
// fallthrough did. So code that uses at::autocast without torchamp behaves as before.
//
// LibTorch does not lock its dispatch table against calls. Registration is safe while other threads
// call ops outside autocast, but not while other threads call the same op inside autocast.
//
// Note [TorchScript]
// LibTorch's JIT rewrites a script that runs with autocast on: it inserts a cast op
// (aten::_autocast_to_reduced_precision or _full_precision) before ops on the JIT's own lists. The
// dispatcher, and so the policy, still gets every op. If a guard is active on the thread,
// torchamp's kernels turn these casts into no-ops. Scripts then follow the policy exactly as C++
// does, in whichever state they first ran; on other threads the JIT's casts stay.
//
// Note [Writes in a region]
// LibTorch's cache returns a weight's cast even after a write to the weight. So in a region the
// kernels of the ops in weight_writing_ops drop the cached casts after a write to a tensor that may
// be a weight. A version counter does not show such writes, because SGD writes through `.data()`,
// which has its own counter. Most other tensors that are written are results of ops, or own their
// memory alone (activations, gradients, optimizer states); for these nothing is dropped.

/// After a call, even if it throws, drops the casts of the tensors that the call writes.
class DropCastsOfWritten {
 public:
  /// `written`: an argument of the call, a tensor or a list.
  explicit DropCastsOfWritten(const c10::IValue& written) {
    for_each_tensor_of(written, [this](const at::Tensor& tensor) {
      if (!may_be_weight(tensor)) return;
      is_fp32_ = is_fp32_ || tensor.scalar_type() == at::kFloat;
      const bool is_counted = tensor.requires_grad() || tensor.is_view() || tensor.is_inference();
      if (!is_counted) uncounted_.push_back(tensor);
    });
  }
  DropCastsOfWritten(const DropCastsOfWritten&) = delete;
  DropCastsOfWritten& operator=(const DropCastsOfWritten&) = delete;
  ~DropCastsOfWritten() {
    if (is_fp32_) at::autocast::clear_cache();
    if (!uncounted_.empty()) weights_changed(uncounted_);
  }

 private:
  /// Whether it may be a weight, a view of one or its `.data()`.
  static bool may_be_weight(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_floating_point() || !tensor.is_leaf()) return false;
    return tensor.requires_grad() || (tensor.has_storage() && tensor.storage().use_count() > 1);
  }

  bool is_fp32_ = false;               // LibTorch's cache holds only casts of fp32 tensors
  std::vector<at::Tensor> uncounted_;  // `.data()`; torchamp's cache detects counted writes itself
};

class AutocastKernel final : public c10::OperatorKernel {
 public:
  /// `native`: LibTorch's kernel, which this kernel replaces, if there is one.
  AutocastKernel(const c10::OperatorHandle& op, std::size_t index, at::DeviceType device,
                 std::optional<NativeKernel> native)
      : native_(std::move(native)),
        index_(index),
        device_(device),
        device_index_(device_index(device, "AutocastKernel")),
        key_(autocast_key(device)),
        after_(c10::DispatchKeySet::FULL_AFTER, key_),
        argument_count_(op.schema().arguments().size()),
        adds_gradients_(adds_gradients(op.operator_name())),
        writes_weights_(contains(weight_writing, op.operator_name())),
        is_script_cast_(op.operator_name().name.starts_with("aten::_autocast_to_")) {}
  ~AutocastKernel() override { delete facts_.load(std::memory_order_relaxed); }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    // Without a policy LibTorch alone decides, and the JIT's casts are made.
    const ThreadPolicy* const of_thread = thread_policy();
    if (!follows_policy(of_thread)) return call_native(op, keys, stack);
    std::optional<DropCastsOfWritten> drop_casts;
    if (writes_weights_) drop_casts.emplace((*stack)[stack->size() - argument_count_]);
    // A policy decides at the ops themselves, so the cast that the JIT has inserted does nothing.
    if (is_script_cast_) return keep_self(*stack);
    // Evaluated once per call: conditions of a rule run the program's code.
    const PolicyData& policy = *of_thread->in_force[device_index_];
    const CompiledRule compiled = policy.rule(device_index_, index_);
    Rule rule = compiled.rule;
    if (compiled.depends_on_call()) {
      rule = policy.decide(compiled, device_, OpCall(op.schema(), *stack));
    }
    // An OpRule takes the arguments unchanged. If it cannot run the call, the arguments are cast.
    OpRuleUsage* const usage = of_thread->op_rule_usage.get();
    if (run_by_op_rule(policy, rule, usage, op, *stack)) return;
    const Facts* const facts = facts_of_op(op);
    const WeightCasts* const weight_casts = of_thread->weight_casts;
    // If a region has its own casts of weights, arguments that LibTorch's kernel would cast to 16
    // bits are cast here, to the same values. Not if PolicyData::decide() has chosen LibTorch's
    // kernel, because it has reported this choice to profilers.
    const bool is_lowered_here = rule.cast == Cast::native && weight_casts != nullptr &&
                                 !compiled.depends_on_call() && facts != nullptr &&
                                 facts->is_natively_lowered;
    if (is_lowered_here) rule = {Cast::lower_precision};
    if (rule.cast == Cast::native) return call_native(op, keys, stack);
    call_cast(rule, weight_casts, facts, op, keys, stack);
  }

 private:
  /// Facts about the op that a call needs. The first call computes them, because most ops are never
  /// called.
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

  /// Null if the op was registered again with other arguments before its first call.
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

  void call_native(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) const {
    if (native_) {
      native_->callBoxed(op, keys, stack);
    } else {
      op.redispatchBoxed(keys & after_, stack);
    }
  }

  /// Whether the thread's policy decides about a call.
  bool follows_policy(const ThreadPolicy* of_thread) const {
    if (of_thread == nullptr) return false;
    if (of_thread->in_force[device_index_] == nullptr) return false;  // a disabled region
    // `add` may be called by autograd itself: see Note [Sums of gradients].
    return !adds_gradients_ || !leaves_sums_alone(*of_thread);
  }

  /// Returns the tensor that a cast of the JIT takes, unchanged.
  void keep_self(torch::jit::Stack& stack) const { torch::jit::drop(stack, argument_count_ - 1); }

  /// Runs the call by the OpRule of the call's rule, if there is one and it can. Records calls that
  /// the policy's OpRule does not reach.
  bool run_by_op_rule(const PolicyData& policy, const Rule& rule, OpRuleUsage* usage,
                      const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
    if (rule.op_rule != nullptr) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
      return rule.op_rule->run(op, device_, stack, usage);
    }
    if (usage != nullptr && policy.op_rule() != nullptr) usage->passed_by(op.operator_name());
    return false;
  }

  /// Calls the op with cast arguments, and with autocast off.
  void call_cast(const Rule& rule, const WeightCasts* weight_casts, const Facts* facts,
                 const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    WrittenCopies written;
    std::optional<NoWarning> no_warning;
    std::optional<at::ScalarType> result_dtype;
    if (rule.cast != Cast::unchanged || rule.where == Where::backward_sums) {
      // Throws if the arguments do not fit this op.
      written = cast_arguments(rule, weight_casts, facts, op, *stack);
      if (facts->is_recurrent_layer) no_warning.emplace(scattered_weights);
      if (rule.where == Where::backward_sums) {
        result_dtype = facts->cast_arguments.widen_for_backward(device_, *stack);
      }
    }
    op.redispatchBoxed(keys & after_, stack);
    if (result_dtype) cast_results(*result_dtype, op, *stack);
    if (!written.empty()) copy_back(written);
  }

  static void cast_results(at::ScalarType dtype, const c10::OperatorHandle& op,
                           torch::jit::Stack& stack) {
    for (std::size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); ++i) {
      c10::IValue& result = stack[i];
      const bool is_wide = result.isTensor() && result.toTensor().scalar_type() == at::kFloat;
      if (is_wide) result = result.toTensor().to(dtype);
    }
  }

  WrittenCopies cast_arguments(const Rule& rule, const WeightCasts* weight_casts,
                               const Facts* facts, const c10::OperatorHandle& op,
                               torch::jit::Stack& stack) const {
    const std::size_t count = op.schema().arguments().size();
    TORCHAMP_CHECK(facts != nullptr && count == argument_count_, "torchamp: '",
                   full_name(op.operator_name()),
                   "' was registered again with other arguments, but policies keep its first "
                   "schema. Give the new op another name.");
    if (facts->takes_probabilities && rule.cast == Cast::fp32) {
      warn_of_16_bit_probabilities(op, stack);
    }
    const CastArguments& cast = facts->cast_arguments;
    if (rule.where == Where::call_is_refused && !cast.is_refused(stack)) return {};
    const bool only_writes = rule.where == Where::call_sums && !cast.sums(stack);
    return cast(only_writes ? Cast::promote : rule.cast, device_, weight_casts, op.schema(), stack);
  }

  std::optional<NativeKernel> native_;  // LibTorch's kernel, which this one replaces
  std::size_t index_;
  at::DeviceType device_;
  std::size_t device_index_;
  c10::DispatchKey key_;
  c10::DispatchKeySet after_;
  std::size_t argument_count_;
  bool adds_gradients_;
  bool writes_weights_;  // see Note [Writes in a region]
  bool is_script_cast_;  // whether the JIT casts by this op
  mutable std::atomic<const Facts*> facts_ = nullptr;
};

/// Makes sure that torchamp's kernel of the op for the device is registered, and returns its index
/// in the rules of a policy. All libraries of the process share the map of kernels, and each
/// registers under its lock. So an op has only one kernel of torchamp.
inline std::size_t register_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  SharedRuntime& runtime = shared_runtime();
  auto& kernels = runtime.kernels[device_index(device, "register_kernel")];
  const std::scoped_lock lock(runtime.mutex);
  if (const auto known = kernels.find(op.operator_name()); known != kernels.end()) {
    return known->second.index;
  }
  const std::size_t index = kernels.size();
  // torchamp's kernel is not registered yet, so the present kernel is LibTorch's.
  std::optional<NativeKernel> native = registered_kernel(op, device);
  const bool has_native = native.has_value();
  const NoWarning of_any_text("");  // LibTorch warns of kernels that replace others
  // (A torch::Library would parse the name, which takes longer than all other work of the first
  // guard for an op.)
  auto registration =
      std::make_unique<c10::RegistrationHandleRAII>(c10::Dispatcher::singleton().registerImpl(
          op.operator_name(), autocast_key(device),
          c10::KernelFunction::makeFromBoxedFunctor(
              std::make_unique<AutocastKernel>(op, index, device, std::move(native))),
          std::nullopt, nullptr, "torchamp kernel"));
  kernels.emplace(op.operator_name(), KnownKernel{index, has_native});
  (void)registration.release();  // never destroyed: its destructor would remove the kernel
  return index;
}

inline void PolicyData::compile(std::size_t device_index) const {
  const at::DeviceType device = autocast_devices[device_index];
  Compiled& compiled = compiled_[device_index];
  const std::scoped_lock lock(mutex_);
  if (compiled.ready.load(std::memory_order_relaxed)) return;
  for (const char* name :
       {"aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    if (op) (void)register_kernel(*op, device);
  }
  for (const std::string_view name : weight_writing_ops) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
      (void)register_kernel(op, device);
    }
  }
  std::vector<CompiledRule> rules_of_device;
  for_each_candidate(*this, [&](const c10::OperatorHandle& op) {
    const CompiledRule rule = compiled_rule(*this, op, device);
    if (rule.leaves_all_to_libtorch()) return;
    const std::size_t index = register_kernel(op, device);
    if (index >= rules_of_device.size()) rules_of_device.resize(index + 1);
    rules_of_device[index] = rule;
  });
  compiled.rules = std::move(rules_of_device);
  compiled.ready.store(true, std::memory_order_release);
}

}  // namespace TORCHAMP_NAMESPACE::detail
