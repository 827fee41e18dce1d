// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. ModulePolicies and WithPolicy: policies for single modules.

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
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/shared/rng_state.h"
#include "torchamp/labs/detail/modules/name_pattern.h"
#include "torchamp/labs/detail/modules/sequential.h"
#include "torchamp/labs/detail/modules/with_policy.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// A torch::nn module that accepts its own policy (see ModulePolicies), for use in place of
/// `Holder`:
///
///     torchamp::WithPolicy<torch::nn::Linear> head{nullptr};
///     head = register_module("head", torchamp::WithPolicy<torch::nn::Linear>(64, 10));
///
/// Otherwise it is the same as a `Holder`: constructors, members, parameter names, checkpoints,
/// printing, `module->as<torch::nn::Linear>()`. Without a policy, forward costs some nanoseconds
/// more. This type is needed because C++ modules have no forward hooks and call each other's
/// forward directly. Entries of a torch::nn::Sequential do not need it.
///
/// If forward has default arguments (LSTM, GRU, MultiheadAttention), a WithPolicy cannot be an
/// entry of a Sequential, which requires a single signature: use the `Holder` there. clone()
/// returns a WithPolicy without a policy.
template <class Holder>
class WithPolicy
    : public torch::nn::ModuleHolder<detail::WithPolicyImpl<typename Holder::ContainedType>> {
 public:
  /// The contained module.
  using Impl = detail::WithPolicyImpl<typename Holder::ContainedType>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  /// For torch::nn::Sequential with named entries.
  WithPolicy(std::initializer_list<torch::nn::NamedAnyModule> modules) requires
      std::constructible_from<Impl, std::initializer_list<torch::nn::NamedAnyModule>>
      : WithPolicy(std::make_shared<Impl>(modules)) {}

  /// Calls forward. LibTorch's own operator() does not support a forward template.
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    return this->get()->forward(std::forward<Arguments>(arguments)...);
  }
};

/// Policies for modules of a model, by dotted name ("encoder.0.norm"; the model itself has the
/// empty name). A module's policy applies during its forward, on devices with autocast on. It
/// replaces the policies of the guard and of enclosing modules.
///
///     torchamp::ModulePolicies policies{{"head", Policy::standard().fp32(ops::matmul)},
///                                       {"encoder.*.norm", Policy::torch()}};
///     policies.apply_to(*model);
///
/// A name selects the module with this name. A pattern must match the whole name: `?` is one
/// character, `*` any number of characters except a dot, `**` any number of any characters; after a
/// backslash (`\*`) these characters are literal. A name has precedence over patterns. If two
/// patterns match one module, it is an error.
///
/// A policy can be set for modules declared as WithPolicy, for entries of a torch::nn::Sequential,
/// and for a torch::nn::Sequential as a whole (which means its entries). A module has one policy
/// for all callers. For an entry with a policy, use `sequential[i]->as<Type>()`:
/// Sequential::at<Type>(i) fails, because it requires the exact type.
///
/// The environment variable TORCHAMP_POLICY also overrides module policies. A value: threads may
/// use copies concurrently. Never synchronises.
class ModulePolicies {
 public:
  ModulePolicies() = default;
  /// Names or patterns with their policies. Error: a duplicate.
  ModulePolicies(std::initializer_list<std::pair<std::string, Policy>> policies) {
    for (const auto& [pattern, policy] : policies) set(pattern, policy);
  }

  /// Adds a name or pattern. Error: a duplicate.
  ModulePolicies& set(std::string pattern, const Policy& policy) {
    TORCH_CHECK(!places_.contains(pattern), "ModulePolicies::set: '", pattern,
                "' has a policy already. Leave out one of the two.");
    places_.emplace(pattern, rules_.size());
    rules_.push_back({std::move(pattern), policy.data()});
    return *this;
  }

  /// The names and patterns with their policies, in order of addition.
  std::vector<std::pair<std::string, Policy>> entries() const {
    std::vector<std::pair<std::string, Policy>> entries;
    for (const Rule& rule : rules_) entries.emplace_back(rule.pattern, Policy(rule.policy));
    return entries;
  }

  /// Sets these policies on the model's modules, and removes the policies of all other modules.
  /// Returns the names of the modules with a policy. Call it again for a clone, and after adding
  /// modules. Do not call it while another thread runs the model.
  ///
  /// Errors, which leave the model unchanged: a name or pattern without a match; two patterns that
  /// match one module; a module that does not accept a policy (see above); a module for which two
  /// names or two Sequentials select different policies; a Sequential that calls a module which is
  /// not registered with it.
  std::vector<std::string> apply_to(torch::nn::Module& model) const;

 private:
  struct Rule {
    std::string pattern;
    std::shared_ptr<const detail::PolicyData> policy;
  };
  /// The rules that match a name best, and how: the name itself, a pattern with the same text, any
  /// pattern.
  struct Fit {
    int how = 0;
    const Rule* rule = nullptr;
    const Rule* other = nullptr;  // another match

    void consider(int by, const Rule& one) {
      if (by > how) {
        *this = {by, &one, nullptr};
      } else if (by == how && other == nullptr) {
        other = &one;
      }
    }
  };
  /// The rule chosen for a site.
  struct Chosen {
    const Rule* rule = nullptr;         // none
    const std::string* as = nullptr;    // its name that the rule matches
    const std::string* from = nullptr;  // the Sequential from which it inherits the rule
  };

  std::vector<Fit> fit(const detail::ForwardSites& sites) const;
  std::vector<Chosen> choose(const detail::ForwardSites& sites) const;
  static void hand_down(const detail::ForwardSites& sites, std::size_t from,
                        std::vector<Chosen>& chosen);
  [[noreturn]] static void refuse_unused(const Rule& rule, const detail::ForwardSites& sites);

  std::vector<Rule> rules_;
  std::map<std::string, std::size_t> places_;  // of the rules, by their patterns
};

inline void ModulePolicies::refuse_unused(const Rule& rule, const detail::ForwardSites& sites) {
  const auto& names = sites.names();  // first the model's own, which is empty
  const auto nearest = std::ranges::min_element(
      names.begin() + 1, names.end(), {},
      [&](const auto& name) { return detail::edit_distance(rule.pattern, name.first); });
  TORCH_CHECK(false, "ModulePolicies::apply_to: no module of the model fits '", rule.pattern, "'. ",
              nearest == names.end()
                  ? std::string("The model has no modules in it; its own name is ''.")
                  : "The nearest name is '" + nearest->first + "'.");
}

// A Sequential only calls its entries: those without their own policy inherit it.
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
    TORCH_CHECK(of_entry.from == nullptr || *of_entry.rule->policy == *chosen[from].rule->policy,
                "ModulePolicies::apply_to: the Sequentials '", *of_entry.from, "', which fits '",
                of_entry.rule->pattern, "', and '", site.name, "', which fits '",
                chosen[from].rule->pattern, "', both call the module '", sites[to].name,
                "', but have different policies. Set one for '", sites[to].name,
                "' itself, or leave out one of the two.");
  }
}

/// The fits of all names. Each name is compared with the rules of the same text, by a look-up, and
/// with all patterns.
inline std::vector<ModulePolicies::Fit> ModulePolicies::fit(
    const detail::ForwardSites& sites) const {
  std::multimap<std::string, const Rule*> of_names;  // the rules of one name are in order
  std::vector<const Rule*> patterns;
  for (const Rule& rule : rules_) {
    if (detail::has_wildcard(rule.pattern)) {
      patterns.push_back(&rule);
    } else {
      of_names.emplace(detail::name_of_pattern(rule.pattern), &rule);
    }
  }
  std::set<const Rule*> used;
  std::vector<Fit> fits;
  for (const auto& [name, index] : sites.names()) {
    Fit& best = fits.emplace_back();
    const auto consider = [&](int how, const Rule& rule) {
      best.consider(how, rule);
      used.insert(&rule);
    };
    const auto [begin, end] = of_names.equal_range(name);
    for (auto found = begin; found != end; ++found) consider(3, *found->second);
    const auto same = places_.find(name);
    if (same != places_.end()) consider(2, rules_[same->second]);
    if (name.empty()) continue;  // the model's own: patterns speak of what is in the model
    for (const Rule* const rule : patterns) {
      if (rule->pattern != name && detail::matches(rule->pattern, name)) consider(1, *rule);
    }
  }
  for (const Rule& rule : rules_) {
    if (!used.contains(&rule)) refuse_unused(rule, sites);
  }
  return fits;
}

inline std::vector<ModulePolicies::Chosen> ModulePolicies::choose(
    const detail::ForwardSites& sites) const {
  const auto& names = sites.names();
  const std::vector<Fit> fits = fit(sites);
  std::vector<Chosen> chosen(sites.size());
  for (std::size_t place = 0; place < names.size(); ++place) {
    const auto& [name, index] = names[place];
    const auto& [how, rule, other] = fits[place];
    if (rule == nullptr) continue;
    TORCH_CHECK(other == nullptr, "ModulePolicies::apply_to: the module '", name, "' fits both '",
                rule->pattern, "' and '", other->pattern,
                "'. Set a policy for its name, or narrow one of the patterns.");
    const Chosen& before = chosen[index];
    TORCH_CHECK(before.rule == nullptr || *before.rule->policy == *rule->policy,
                "ModulePolicies::apply_to: one module is registered as '", *before.as,
                "', which fits '", before.rule->pattern, "', and as '", name, "', which fits '",
                rule->pattern, "'. Set a policy for one of its names only.");
    const detail::ForwardSite& site = sites[index];
    if (site.is_container() && detail::has_wildcard(rule->pattern)) continue;
    TORCH_CHECK(site.reachable(), "ModulePolicies::apply_to: '", name, "' (", site.module->name(),
                "), which fits '", rule->pattern,
                "', does not accept a policy. Declare it as "
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
  const std::vector<Chosen> chosen = choose(sites);
  // Here, and not in the middle of a forward, when other threads may be running ops.
  for (std::size_t i = 0; i < detail::device_count; ++i) {
    const at::DeviceType device = detail::autocast_devices[i];
    const bool may_be_used =
        detail::device_is_here(device) || at::autocast::is_autocast_enabled(device);
    if (!may_be_used || !at::autocast::is_autocast_available(device)) continue;
    for (const Rule& rule : rules_) rule.policy->compile_once(i);
  }
  std::vector<std::string> names;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    const Rule* const rule = chosen[i].rule;
    sites[i].put(rule == nullptr ? nullptr : rule->policy);
    if (rule != nullptr) names.push_back(sites[i].name);
  }
  return names;
}

}  // namespace TORCHAMP_NAMESPACE
