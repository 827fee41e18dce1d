// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief ModulePolicies and WithPolicy: policies of single modules.

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/named_any.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/modules/sequential.h"
#include "torchamp/detail/modules/with_policy.h"
#include "torchamp/detail/overlay/compile.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/name_pattern.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// A torch::nn module that can be given a policy of its own (see ModulePolicies), for use in place
/// of `Holder`:
///
///     torchamp::WithPolicy<torch::nn::Linear> head{nullptr};
///     head = register_module("head", torchamp::WithPolicy<torch::nn::Linear>(64, 10));
///
/// It is a `Holder` in all other respects: constructors, members, parameter names, checkpoints,
/// printing, `module->as<torch::nn::Linear>()`. Without a policy, forward costs some
/// nanoseconds more. C++ modules have no forward hooks and call each other's forward directly,
/// hence the type; entries of a torch::nn::Sequential can be given policies without it.
///
/// Where forward has default arguments (LSTM, GRU, MultiheadAttention), it cannot be put into a
/// Sequential, which asks for one signature: put the `Holder` there, whose entries need none.
///
/// clone() gives a WithPolicy too, without a policy.
template <class Holder>
class WithPolicy
    : public torch::nn::ModuleHolder<detail::WithPolicyImpl<typename Holder::ContainedType>> {
 public:
  /// The module that it holds.
  using Impl = detail::WithPolicyImpl<typename Holder::ContainedType>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  /// For torch::nn::Sequential with named entries.
  WithPolicy(std::initializer_list<torch::nn::NamedAnyModule> modules) requires
      std::constructible_from<Impl, std::initializer_list<torch::nn::NamedAnyModule>>
      : WithPolicy(std::make_shared<Impl>(modules)) {}

  /// Calls forward. LibTorch's own operator() does not know a forward that is a template.
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    return this->get()->forward(std::forward<Arguments>(arguments)...);
  }
};

/// Policies for modules of a model, by dotted name ("encoder.0.norm"; the model's own name is
/// empty). A module's policy is in force during its forward, on devices where autocast is on, and
/// replaces that of the guard and of the modules around it.
///
///     torchamp::ModulePolicies policies{{"head", Policy::standard().fp32(ops::matmul)},
///                                       {"encoder.*.norm", Policy::torch()}};
///     policies.apply_to(*model);
///
/// A name stands for that module. A pattern must fit the whole name: `?` is one character, `*` any
/// number of them without a dot, `**` any number with dots. A name wins over patterns; a module
/// that two patterns fit is an error.
///
/// Forward can be put under a policy for modules declared as WithPolicy, for entries of a
/// torch::nn::Sequential, and for a torch::nn::Sequential as a whole (which means its entries). A
/// module has one policy, whatever calls it. An entry that has a policy is no longer found by
/// Sequential::at<Type>(i), which asks for the exact type; `sequential[i]->as<Type>()` finds it.
///
/// The environment variable TORCHAMP_POLICY overrides module policies too. Threads: a value; copies
/// may be used anywhere. Never reads a device.
class ModulePolicies {
 public:
  ModulePolicies() = default;
  /// Names or patterns with their policies. Error: the same one twice.
  ModulePolicies(std::initializer_list<std::pair<std::string, Policy>> policies) {
    for (const auto& [pattern, policy] : policies) set(pattern, policy);
  }

  /// Adds a name or pattern. Error: one that is there already.
  ModulePolicies& set(std::string pattern, const Policy& policy);

  /// Makes these the policies of the model's modules; modules that nothing fits have none
  /// afterwards. Returns the names of the modules that have one. Call it again for a clone, and
  /// after adding modules. Not while another thread runs the model.
  ///
  /// Errors, each leaving the model as it was: a name or pattern that fits no module, a module that
  /// two patterns fit, a module whose forward cannot be reached (see above), a module to which two
  /// names or two Sequentials give different policies, a Sequential that calls a module which is
  /// not registered with it.
  std::vector<std::string> apply_to(torch::nn::Module& model) const;

 private:
  struct Rule {
    std::string pattern;
    std::shared_ptr<const detail::PolicyData> policy;
  };
  /// What a site is given.
  struct Chosen {
    const Rule* rule = nullptr;         // none
    const std::string* as = nullptr;    // its name that the rule fits
    const std::string* from = nullptr;  // the Sequential that hands the rule down to it
  };

  const Rule* rule_for(const std::string& name) const;
  std::vector<Chosen> choose(const detail::ForwardSites& sites) const;
  static void hand_down(const detail::ForwardSites& sites, std::size_t from,
                        std::vector<Chosen>& chosen);
  void check_all_used(const detail::ForwardSites& sites) const;
  void register_overlays(const torch::nn::Module& model) const;

  std::vector<Rule> rules_;
};

inline ModulePolicies& ModulePolicies::set(std::string pattern, const Policy& policy) {
  for (const Rule& rule : rules_) {
    TORCH_CHECK(rule.pattern != pattern, "ModulePolicies::set: '", pattern,
                "' has a policy already. Leave out one of the two.");
  }
  rules_.push_back({std::move(pattern), policy.data()});
  return *this;
}

inline const ModulePolicies::Rule* ModulePolicies::rule_for(const std::string& name) const {
  const Rule* found = nullptr;
  for (const Rule& rule : rules_) {
    if (rule.pattern == name) return &rule;
  }
  if (name.empty()) return nullptr;  // patterns speak of what is in the model
  for (const Rule& rule : rules_) {
    if (!detail::matches(rule.pattern, name)) continue;
    TORCH_CHECK(found == nullptr, "ModulePolicies::apply_to: the module '", name, "' fits both '",
                found->pattern, "' and '", rule.pattern,
                "'. Set a policy for its name, or narrow one of the patterns.");
    found = &rule;
  }
  return found;
}

inline void ModulePolicies::check_all_used(const detail::ForwardSites& sites) const {
  for (const Rule& rule : rules_) {
    const auto& names = sites.names();
    const bool used = std::any_of(names.begin(), names.end(), [&](const auto& name) {
      return name.first.empty() ? rule.pattern.empty() : detail::matches(rule.pattern, name.first);
    });
    if (used) continue;
    std::string nearest;  // the model's own name is empty
    for (const auto& [name, index] : names) {
      if (nearest.empty() || detail::edit_distance(rule.pattern, name) <
                                 detail::edit_distance(rule.pattern, nearest)) {
        nearest = name;
      }
    }
    TORCH_CHECK(!nearest.empty(), "ModulePolicies::apply_to: no module of the model fits '",
                rule.pattern, "'. The model has no modules in it; its own name is ''.");
    TORCH_CHECK(false, "ModulePolicies::apply_to: no module of the model fits '", rule.pattern,
                "'. The nearest name is '", nearest, "'.");
  }
}

// Registers with the dispatcher here what the policies need for the devices that the model may run
// on, and not in the middle of a forward, when other threads may be running ops.
inline void ModulePolicies::register_overlays(const torch::nn::Module& model) const {
  std::set<at::DeviceType> devices;
  for (const auto& tensors : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined()) devices.insert(tensor.device().type());
    }
  }
  // Inputs may lie elsewhere, and a model need not have parameters.
  devices.insert(at::kCPU);
  if (at::accelerator::deviceCount() > 0) devices.insert(*at::accelerator::getAccelerator());
  for (const at::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(device)) devices.insert(device);
  }
  for (const at::DeviceType device : devices) {
    if (!at::autocast::is_autocast_available(device)) continue;
    for (const Rule& rule : rules_) detail::compile_once(*rule.policy, device);
  }
}

// A Sequential only calls its entries: those without a policy of their own take it over.
inline void ModulePolicies::hand_down(const detail::ForwardSites& sites, std::size_t from,
                                      std::vector<Chosen>& chosen) {
  const detail::ForwardSite& site = sites[from];
  if (site.sequential == nullptr || site.holder != nullptr) return;
  if (!site.entries.empty() && !site.may_be_called_directly()) return;
  for (const torch::nn::AnyModule& entry : *site.sequential) {
    const std::size_t to = sites.index_of(entry);
    Chosen& of_entry = chosen[to];
    if (of_entry.rule == nullptr) {
      of_entry = {chosen[from].rule, nullptr, &site.name};
      hand_down(sites, to, chosen);
      continue;
    }
    TORCH_CHECK(of_entry.from == nullptr ||
                    detail::is_same(*of_entry.rule->policy, *chosen[from].rule->policy),
                "ModulePolicies::apply_to: the Sequentials '", *of_entry.from, "', which fits '",
                of_entry.rule->pattern, "', and '", site.name, "', which fits '",
                chosen[from].rule->pattern, "', both call the module '", sites[to].name,
                "', but have different policies. Set one for '", sites[to].name,
                "' itself, or leave out one of the two.");
  }
}

inline std::vector<ModulePolicies::Chosen> ModulePolicies::choose(
    const detail::ForwardSites& sites) const {
  std::vector<Chosen> chosen(sites.size());
  for (const auto& [name, index] : sites.names()) {
    const Rule* rule = rule_for(name);
    if (rule == nullptr) continue;
    const Chosen& before = chosen[index];
    TORCH_CHECK(before.rule == nullptr || detail::is_same(*before.rule->policy, *rule->policy),
                "ModulePolicies::apply_to: one module is registered as '", *before.as,
                "', which fits '", before.rule->pattern, "', and as '", name, "', which fits '",
                rule->pattern, "'. Set a policy for one of its names only.");
    const detail::ForwardSite& site = sites[index];
    if (site.is_container() && detail::has_wildcard(rule->pattern)) continue;
    TORCH_CHECK(site.reachable(), "ModulePolicies::apply_to: '", name, "' (", site.module->name(),
                "), which fits '", rule->pattern,
                "', has no forward that a policy can be put around. Declare it as "
                "torchamp::WithPolicy<...>, or leave it out of the pattern.");
    chosen[index] = {rule, &name, nullptr};
  }
  for (std::size_t i = 0; i < sites.size(); ++i) {
    if (chosen[i].as != nullptr) hand_down(sites, i, chosen);
  }
  return chosen;
}

inline std::vector<std::string> ModulePolicies::apply_to(torch::nn::Module& model) const {
  const detail::ForwardSites sites(model);
  check_all_used(sites);
  const std::vector<Chosen> chosen = choose(sites);
  register_overlays(model);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    const Rule* const rule = chosen[i].rule;
    sites[i].put(rule == nullptr ? nullptr : rule->policy);
    if (rule != nullptr) names.push_back(sites[i].name);
  }
  return names;
}

}  // namespace TORCHAMP_NAMESPACE
