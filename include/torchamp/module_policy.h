// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief ModulePolicies and WithPolicy: policies of single modules.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/named_any.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/libtorch.h"
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
/// number of them without a dot, `**` any number with dots, and behind a backslash (`\*`) each
/// stands for itself. A name wins over patterns; a module that two patterns fit is an error.
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

  /// The names and patterns with their policies, in the order in which they were added.
  std::vector<std::pair<std::string, Policy>> entries() const;

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

  /// What fits one name. Rules that name it win over patterns.
  struct Fit {
    enum class Kind { pattern, pattern_of_the_same_text, name } kind = Kind::pattern;
    const Rule* rule = nullptr;
    const Rule* other = nullptr;  // of the same kind

    void add(Kind its_kind, const Rule& its_rule);
  };

  std::vector<Fit> fits(const detail::ForwardSites& sites) const;
  std::vector<Chosen> choose(const detail::ForwardSites& sites) const;
  static void hand_down(const detail::ForwardSites& sites, std::size_t from,
                        std::vector<Chosen>& chosen);
  [[noreturn]] static void refuse_unused(const Rule& rule, const detail::ForwardSites& sites);
  void register_overlays(const torch::nn::Module& model) const;

  std::vector<Rule> rules_;
  std::set<std::string> patterns_;  // those of the rules
};

inline ModulePolicies& ModulePolicies::set(std::string pattern, const Policy& policy) {
  TORCH_CHECK(patterns_.insert(pattern).second, "ModulePolicies::set: '", pattern,
              "' has a policy already. Leave out one of the two.");
  rules_.push_back({std::move(pattern), policy.data()});
  return *this;
}

inline std::vector<std::pair<std::string, Policy>> ModulePolicies::entries() const {
  std::vector<std::pair<std::string, Policy>> entries;
  entries.reserve(rules_.size());
  for (const Rule& rule : rules_) entries.emplace_back(rule.pattern, Policy(rule.policy));
  return entries;
}

inline void ModulePolicies::Fit::add(Kind its_kind, const Rule& its_rule) {
  if (rule == nullptr || its_kind > kind) {
    *this = {its_kind, &its_rule, nullptr};
  } else if (its_kind == kind && other == nullptr && rule != &its_rule) {
    other = &its_rule;
  }
}

// In the order of sites.names(). A pattern is compared with the names that begin as it does.
inline std::vector<ModulePolicies::Fit> ModulePolicies::fits(
    const detail::ForwardSites& sites) const {
  const auto& names = sites.names();
  std::map<std::string_view, std::size_t> places;
  for (std::size_t i = 0; i < names.size(); ++i) places.emplace(names[i].first, i);
  std::vector<Fit> fits(names.size());
  for (const Rule& rule : rules_) {
    bool is_used = false;
    const auto add = [&](std::size_t place, Fit::Kind kind) {
      fits[place].add(kind, rule);
      is_used = true;
    };
    const std::string literal = detail::literal_of(rule.pattern);
    if (!detail::has_wildcard(rule.pattern)) {
      const auto named = places.find(literal);
      if (named != places.end()) add(named->second, Fit::Kind::name);
    } else {
      for (auto at = places.lower_bound(literal);
           at != places.end() && at->first.starts_with(literal); ++at) {
        // The model's own name is empty, and patterns speak of what is in the model.
        if (!at->first.empty() && detail::matches(rule.pattern, at->first)) {
          add(at->second, Fit::Kind::pattern);
        }
      }
    }
    const auto same = rule.pattern == literal ? places.end() : places.find(rule.pattern);
    if (same != places.end()) add(same->second, Fit::Kind::pattern_of_the_same_text);
    if (!is_used) refuse_unused(rule, sites);
  }
  return fits;
}

inline void ModulePolicies::refuse_unused(const Rule& rule, const detail::ForwardSites& sites) {
  std::string nearest;  // the model's own name is empty
  for (const auto& [name, index] : sites.names()) {
    if (nearest.empty() ||
        detail::edit_distance(rule.pattern, name) < detail::edit_distance(rule.pattern, nearest)) {
      nearest = name;
    }
  }
  TORCH_CHECK(!nearest.empty(), "ModulePolicies::apply_to: no module of the model fits '",
              rule.pattern, "'. The model has no modules in it; its own name is ''.");
  C10_THROW_ERROR(Error, c10::str("ModulePolicies::apply_to: no module of the model fits '",
                                  rule.pattern, "'. The nearest name is '", nearest, "'."));
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
  if (const auto type = detail::accelerator()) {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*type);
    if (hooks.deviceCount() > 0) devices.insert(*type);
  }
  for (const at::DeviceType device : detail::autocast_devices) {
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
  const std::vector<Fit> all = fits(sites);
  for (std::size_t place = 0; place < all.size(); ++place) {
    const auto& [name, index] = sites.names()[place];
    const Rule* const rule = all[place].rule;
    if (rule == nullptr) continue;
    TORCH_CHECK(all[place].other == nullptr, "ModulePolicies::apply_to: the module '", name,
                "' fits both '", rule->pattern, "' and '", all[place].other->pattern,
                "'. Set a policy for its name, or narrow one of the patterns.");
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
