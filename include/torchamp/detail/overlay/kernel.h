// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/overlay/cast_arguments.h"
#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/policy/special_ops.h"
#include "torchamp/detail/text.h"

namespace torchamp::detail {

/// A kernel for ops of any schema. One class for LibTorch, whatever lies behind it.
class BoxedKernel : public c10::OperatorKernel {
 public:
  virtual void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) const = 0;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    call(op, keys, stack);
  }
};

/// Whether LibTorch's own kernel for the device casts the op's arguments to 16 bits.
inline bool lowers_natively(const c10::OperatorHandle& op, at::DeviceType device) {
  return has_native_kernel(op, device) && why_not_castable(op.schema()).empty() &&
         kernel_rule(full_name(op.operator_name()), device) == Cast::lower_precision;
}

// Note [Overlays]
// An overlay is a boxed kernel for one op under one device's autocast key. It is registered at most
// once per process, when the first policy that disagrees with LibTorch about that op comes into
// force, and asks the calling thread's policy on every call. Without a torchamp guard, or where the
// policy has no rule for the op, it does what LibTorch did before: it calls the autocast kernel
// that it covers, or, where there was none, passes the call on to the next key with autocast still
// on (as the fallthrough did). So code that uses at::autocast without torchamp sees no change.
//
// LibTorch does not lock its dispatch table against calls. Registration is safe next to threads
// that call ops outside autocast, but not next to threads that call the same op inside it: let the
// first guard with a new policy be made before such threads start.
class Overlay final : public BoxedKernel {
 public:
  Overlay(const c10::OperatorHandle& op, std::size_t index, at::DeviceType device,
          const NativeKernel* native)
      : native_(native),
        index_(index),
        device_(device),
        device_index_(device_index(device, "Overlay")),
        key_(autocast_key(device)),
        after_(c10::DispatchKeySet::FULL_AFTER, key_),
        argument_count_(op.schema().arguments().size()),
        adds_gradients_(adds_gradients(op.operator_name())) {}
  Overlay(const Overlay&) = delete;
  Overlay& operator=(const Overlay&) = delete;
  ~Overlay() override { delete facts_.load(std::memory_order_relaxed); }

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
            torch::jit::Stack* stack) const override {
    const ThreadPolicy* const of_thread = thread_policy();
    if (of_thread == nullptr) return call_native(op, keys, stack);
    const PolicyData* const policy = of_thread->in_force[device_index_].get();
    if (policy == nullptr) return call_native(op, keys, stack);
    if (adds_gradients_ && leaves_sums_alone(*of_thread)) return call_native(op, keys, stack);
    const OverlayTable::Rule rule = policy->rule(device_index_, index_, device_, op, *stack);
    const Facts* const facts = facts_of_op(op);
    if (facts != nullptr && facts->is_product &&
        follow_op_rule(*of_thread, *policy, rule, op, *stack))
      return;
    const WeightCasts* const casts = casts_of_weights(*of_thread, rule, facts);
    const Cast cast = casts != nullptr ? Cast::lower_precision : rule.cast;
    if (cast == Cast::native) return call_native(op, keys, stack);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    const StandIns stand_ins = cast_arguments(facts, cast, casts, op, *stack);
    if (cast != Cast::unchanged && facts->is_recurrent_layer) {
      const NoWarningOfScatteredWeights no_warning;
      op.redispatchBoxed(keys & after_, stack);
    } else {
      op.redispatchBoxed(keys & after_, stack);
    }
    stand_ins.copy_back();
  }

 private:
  /// What a call needs to know of its op. Most ops with an overlay are never called, so the first
  /// call finds it out.
  struct Facts {
    Facts(const c10::OperatorHandle& op, at::DeviceType device)
        : cast_arguments(op.schema(), promotes_its_arguments(op.operator_name())),
          takes_probabilities(detail::takes_probabilities(op.operator_name())),
          is_recurrent_layer(detail::is_recurrent_layer(op.operator_name())),
          is_product(detail::is_product(op.operator_name())),
          is_natively_lowered(lowers_natively(op, device)) {}

    CastArguments cast_arguments;
    bool takes_probabilities;
    bool is_recurrent_layer;
    bool is_product;
    bool is_natively_lowered;
  };

  /// Whether the op still has the arguments that it had when the overlay was made.
  bool is_as_it_was(const c10::OperatorHandle& op) const {
    return op.schema().arguments().size() == argument_count_;
  }

  /// Null of an op that is not as it was.
  const Facts* facts_of_op(const c10::OperatorHandle& op) const {
    const Facts* known = facts_.load(std::memory_order_acquire);
    if (known != nullptr || !is_as_it_was(op)) return known;
    auto made = std::make_unique<const Facts>(op, device_);
    if (facts_.compare_exchange_strong(known, made.get(), std::memory_order_acq_rel)) {
      known = made.release();
    }
    return known;
  }

  void call_native(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) const {
    if (native_) {
      native_->callBoxed(op, keys, stack);
    } else {
      op.redispatchBoxed(keys & after_, stack);
    }
  }

  /// Lets the OpRule of the call's rule run it, if there is one and it can; tells those who want to
  /// know.
  bool follow_op_rule(const ThreadPolicy& of_thread, const PolicyData& policy,
                      const OverlayTable::Rule& rule, const c10::OperatorHandle& op,
                      torch::jit::Stack& stack) const {
    OpRuleUsage* const usage = of_thread.op_rule_usage.get();
    if (rule.edit == nullptr) {
      if (usage != nullptr && !usage->has_run() && policy.op_rule() != nullptr) {
        usage->called_instead(c10::toString(op.operator_name()), {});
      }
      return false;
    }
    std::string why = policy.refusal(device_index_, *rule.edit);
    if (why.empty()) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
      why = rule.edit->op_rule->run(op, device_, stack);
    }
    announce(fp8_scope, why);
    if (usage != nullptr && why.empty()) usage->run();
    if (usage != nullptr && !why.empty() && !usage->has_run()) {
      usage->called_instead(c10::toString(op.operator_name()), why);
    }
    return why.empty();
  }

  /// Who casts the call's weights to 16 bits, if not LibTorch.
  static const WeightCasts* casts_of_weights(const ThreadPolicy& of_thread,
                                             const OverlayTable::Rule& rule, const Facts* facts) {
    if (of_thread.casts == nullptr) return nullptr;
    const bool is_native = rule.cast == Cast::native && !rule.is_chosen && facts != nullptr &&
                           facts->is_natively_lowered;
    const bool is_lowered = rule.cast == Cast::lower_precision || rule.cast == Cast::fp8;
    return is_native || is_lowered ? of_thread.casts : nullptr;
  }

  StandIns cast_arguments(const Facts* facts, Cast cast, const WeightCasts* casts,
                          const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
    if (cast == Cast::unchanged) return {};
    TORCH_CHECK(facts != nullptr && is_as_it_was(op), "torchamp: '", op.operator_name(),
                "' was registered again with other arguments, but policies hold on to its first "
                "schema. Give the new one another name.");
    if (facts->takes_probabilities && cast == Cast::fp32) warn_of_16_bit_probabilities(op, stack);
    if (casts != nullptr) {
      casts->cast(op.schema(), facts->cast_arguments.positions(),
                  at::autocast::get_autocast_dtype(device_), device_, stack);
    }
    return facts->cast_arguments(cast, device_, stack);
  }

  const NativeKernel* native_;  // null if there was none
  std::size_t index_;
  at::DeviceType device_;
  std::size_t device_index_;
  c10::DispatchKey key_;
  c10::DispatchKeySet after_;
  std::size_t argument_count_;
  bool adds_gradients_;
  mutable std::atomic<const Facts*> facts_ = nullptr;
};

class SilentWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

/// Registers a kernel for the op under the device's autocast key, for as long as the process lives.
inline void register_kernel(const c10::OperatorHandle& op, at::DeviceType device,
                            std::unique_ptr<BoxedKernel> kernel) {
  // LibTorch warns of kernels that replace others; these are ours, and stand in for what they
  // cover.
  SilentWarnings silent;
  const c10::WarningUtils::WarningHandlerGuard no_warning(&silent);
  // Never destroyed: its end would take the kernel away. (A torch::Library would first parse the
  // name, which takes longer than all else that the first guard does for an op.)
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), autocast_key(device),
      c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)), std::nullopt, nullptr,
      "torchamp/detail/overlay/kernel.h"));
}

/// Makes an op's kernel for a device, given its index in the tables and LibTorch's own kernel,
/// which lives as long as the process, or null.
using MakeKernel = std::unique_ptr<BoxedKernel> (*)(const c10::OperatorHandle& op,
                                                    at::DeviceType device, std::size_t index,
                                                    const NativeKernel* native);

/// Makes sure that the op has its overlay for the device; returns the overlay's index in the
/// tables.
inline std::size_t install_overlay(const c10::OperatorHandle& op, at::DeviceType device,
                                   MakeKernel make) {
  const std::string name = full_name(op.operator_name());
  SharedRuntime& runtime = shared_runtime();
  auto& overlays = runtime.overlays[device_index(device, "install_overlay")];
  const std::scoped_lock lock(runtime.mutex);
  const std::size_t index = overlays.size();
  const auto known = overlays.index_of.find(name);
  if (known != overlays.index_of.end()) return known->second;
  try {
    overlays.index_of[name] = index;
    const bool has_native = has_autocast_kernel(op, device);
    const NativeKernel* native = nullptr;
    if (has_native) {  // never destroyed, like the kernel that calls it
      native = new NativeKernel(kernel_of(op, autocast_key(device)));
    }
    overlays.has_native.push_back(has_native);
    register_kernel(op, device, make(op, device, index, native));
  } catch (...) {
    overlays.has_native.resize(index);
    overlays.index_of.erase(name);
    throw;
  }
  return index;
}

// Note [TorchScript]
// When a scripted function runs in a region with autocast on, LibTorch's JIT rewrites it by op
// lists of its own: it puts a cast op (aten::_autocast_to_reduced_precision or _full_precision)
// before ops on those lists, and runs the result with autocast still on. The dispatcher, and so the
// policy, therefore does see every op; only the JIT's casts stand in its way. They are ops like
// others, so an overlay makes them no-ops wherever a torchamp guard is in force on
// the thread. Scripts then follow the policy exactly as C++ does, whichever state they were first
// run in, while threads that use at::autocast without torchamp keep the JIT's casts. Nothing
// process-wide is switched.
class ScriptCastOverlay final : public BoxedKernel {
 public:
  explicit ScriptCastOverlay(at::DeviceType device)
      : device_index_(device_index(device, "ScriptCastOverlay")),
        after_(c10::DispatchKeySet::FULL_AFTER, autocast_key(device)) {}

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
            torch::jit::Stack* stack) const override {
    if (policy_in_force(device_index_) == nullptr) return op.redispatchBoxed(keys & after_, stack);
    torch::jit::drop(*stack, op.schema().arguments().size() - 1);  // leaves `self` as the result
  }

 private:
  std::size_t device_index_;
  c10::DispatchKeySet after_;
};

inline std::unique_ptr<BoxedKernel> make_script_cast_overlay(const c10::OperatorHandle&,
                                                             at::DeviceType device, std::size_t,
                                                             const NativeKernel*) {
  return std::unique_ptr<BoxedKernel>(new ScriptCastOverlay(device));
}

/// Makes the JIT's casts follow Note [TorchScript] on a device.
inline void install_script_cast_overlays(at::DeviceType device) {
  for (const char* name : {"_autocast_to_reduced_precision", "_autocast_to_full_precision"}) {
    for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
      install_overlay(op, device, &make_script_cast_overlay);
    }
  }
}

}  // namespace torchamp::detail
