// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "torchamp/autocast.h"
#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The data that a ModulePolicies sets at a module: its dotted name in the model, and a policy or
/// none.
struct ModulePolicy {
  std::string name;
  std::shared_ptr<const PolicyData> policy;
};

/// The calling thread's state with `policy` set, on the devices with autocast on.
inline std::shared_ptr<const ThreadPolicy> thread_policy_with(
    const std::shared_ptr<const PolicyData>& policy) {
  auto inner = copy_of(thread_policy());
  inner->inherited = policy;
  const auto& devices = autocast_devices;
  for (std::size_t i = 0; i < device_count; ++i) {
    if (at::autocast::is_autocast_enabled(devices[i])) {
      prepare_region("ModulePolicies", *policy, inner->weight_casts, i,
                     at::autocast::get_autocast_dtype(devices[i]));
      inner->in_force[i] = policy;
    }
  }
  if (const OpRule* rule = policy->op_rule()) {
    inner->op_rule_usage = rule->make_usage(inner->op_rule_usage);
  }
  return inner;
}

/// Scope of a module's forward: its policy, and a user scope of its name for recorders (LibTorch's
/// profiler, CastRecorder).
class ForwardScope {
 public:
  explicit ForwardScope(const ModulePolicy* module) : policy_(policy_of(module)) {
    if (module == nullptr) return;
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      record_.emplace(std::move(*callbacks));
      record_->before(module->name);
    }
  }

 private:
  static std::shared_ptr<const ThreadPolicy> policy_of(const ModulePolicy* module) {
    if (module == nullptr || module->policy == nullptr) return nullptr;
    const GuardOverride& guards = guard_override(thread_policy());
    if (guards.off || (guards.policy && !guards.module_policies)) return nullptr;
    return thread_policy_with(module->policy);
  }

  PolicyScope policy_;
  std::optional<at::RecordFunction> record_;
};

/// A module that accepts a policy around its forward.
class PolicyHolder {
 public:
  virtual ~PolicyHolder() = default;

  const ModulePolicy* module_policy() const { return policy_.get(); }
  const std::shared_ptr<const ModulePolicy>& shared_module_policy() const { return policy_; }
  void set_module_policy(std::shared_ptr<const ModulePolicy> policy) {
    policy_ = std::move(policy);
  }

 private:
  std::shared_ptr<const ModulePolicy> policy_;
};

/// The common part of both forms of WithPolicyImpl.
template <class Self, class Module>
class PolicyModule : public Module, public PolicyHolder {
 public:
  using Module::Module;
  using PlainPrint = decltype(&torch::nn::Module::pretty_print);

  /// By default a module prints its name, which is Module's.
  void pretty_print(std::ostream& stream) const override {
    if constexpr (std::same_as<decltype(&Module::pretty_print), PlainPrint>) {
      stream << c10::demangle(typeid(Module).name());
    } else {
      Module::pretty_print(stream);
    }
  }

  /// A deep copy, as of Module, without a policy.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    if constexpr (std::copy_constructible<Module> && std::is_copy_assignable_v<Module>) {
      const std::shared_ptr<torch::nn::Module> deep = Module::clone(device);
      auto copy = std::make_shared<Self>(static_cast<const Self&>(*this));
      static_cast<Module&>(*copy) = dynamic_cast<const Module&>(*deep);
      copy->set_module_policy(nullptr);
      return copy;
    } else {
      return Module::clone(device);
    }
  }
};

template <class Module, class... Arguments>
concept CallableWith = requires(Module& module, Arguments... arguments) {
  module.forward(std::forward<Arguments>(arguments)...);
};

/// Whether forward can be called without its last argument.
template <class Module, class Arguments, std::size_t... I>
constexpr bool callable_without_last(std::index_sequence<I...>) {
  return CallableWith<Module, std::tuple_element_t<I, Arguments>...>;
}

/// The type of &Module::forward, if there is exactly one forward, without default arguments;
/// otherwise void.
template <class Module>
struct ForwardOf {
  using type = void;
};
template <class Module, class Class, class Result, class... Arguments>
auto forward_type(Result (Class::*forward)(Arguments...)) {
  if constexpr (sizeof...(Arguments) > 0) {
    constexpr auto all_but_last = std::make_index_sequence<sizeof...(Arguments) - 1>();
    if constexpr (!callable_without_last<Module, std::tuple<Arguments...>>(all_but_last)) {
      return forward;
    }
  } else {
    return forward;
  }
}

template <class Module>
requires requires {
  forward_type<Module>(&Module::forward);
}

struct ForwardOf<Module> {
  using type = decltype(forward_type<Module>(&Module::forward));
};

/// `Module` with a forward under the module's policy. In general a template, so default arguments
/// and overloads are preserved.
template <class Module, class Forward = typename ForwardOf<Module>::type>
class WithPolicyImpl : public PolicyModule<WithPolicyImpl<Module, Forward>, Module> {
 public:
  using PolicyModule<WithPolicyImpl, Module>::PolicyModule;

  template <class... Arguments>
  decltype(auto) forward(Arguments&&... arguments) {
    const ForwardScope scope(this->module_policy());
    return Module::forward(std::forward<Arguments>(arguments)...);
  }
};

/// The same for a module with one forward: keeps its signature, which torch::nn::AnyModule
/// requires.
template <class Module, class Class, class Result, class... Arguments>
class WithPolicyImpl<Module, Result (Class::*)(Arguments...)>
    : public PolicyModule<WithPolicyImpl<Module, Result (Class::*)(Arguments...)>, Module> {
 public:
  using PolicyModule<WithPolicyImpl, Module>::PolicyModule;

  Result forward(Arguments... arguments) {
    const ForwardScope scope(this->module_policy());
    return Module::forward(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace TORCHAMP_NAMESPACE::detail
