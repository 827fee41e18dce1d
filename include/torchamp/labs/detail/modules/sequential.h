// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/labs/detail/modules/with_policy.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Entries of a Sequential]
// torch::nn::Sequential calls its modules through torch::nn::AnyModule, that is, a virtual function
// of torch::nn::AnyModuleHolder. So an entry of a Sequential can get a policy from outside: the
// entry is replaced by an AnyModule that holds the old AnyModule and calls it in a ForwardScope.
// The module stays registered with the Sequential: its name, parameters and place in a checkpoint
// are unchanged, as are Sequential::ptr(i) and operator[]. AnyModule::get and Sequential::at, which
// require the exact type of an AnyModule, fail with LibTorch's error for a wrong type.
//
// A clone has no policy, so it gets the replaced entry back: the AnyModulePlaceholder of an
// AnyModule, to which AnyModule gives no access. But a template argument of an explicit
// instantiation may name a private member, and a friend function can expose it.

using AnyModuleContent = std::unique_ptr<torch::nn::AnyModulePlaceholder> torch::nn::AnyModule::*;
inline AnyModuleContent any_module_content();
template <AnyModuleContent content>
struct AnyModuleContentOf {
  friend inline AnyModuleContent any_module_content() { return content; }
};
template struct AnyModuleContentOf<&torch::nn::AnyModule::content_>;

/// The replacement of an entry of a Sequential.
class PolicyEntry : public torch::nn::Module {
 public:
  PolicyEntry(torch::nn::AnyModule module, std::shared_ptr<const ModulePolicy> policy)
      : module_(std::move(module)), policy_(std::move(policy)) {}

  const torch::nn::AnyModule& module() const { return module_; }

  torch::nn::AnyValue run(std::vector<torch::nn::AnyValue>& arguments) {
    const ForwardScope scope(policy_.get());
    return call<0>(arguments);
  }

  /// Never called: AnyModule derives the arguments' types from it.
  int forward(int unused) { return unused; }

 private:
  static constexpr std::size_t most_arguments = 12;

  template <std::size_t count>
  torch::nn::AnyValue call(std::vector<torch::nn::AnyValue>& arguments) {
    if constexpr (count < most_arguments) {
      if (arguments.size() != count) return call<count + 1>(arguments);
    }
    TORCH_CHECK(arguments.size() == count,
                "ModulePolicies: a module in a Sequential was called with ", arguments.size(),
                " arguments. Declare it as torchamp::WithPolicy instead.");
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return module_.any_forward(std::move(arguments[I])...);
    }
    (std::make_index_sequence<count>());
  }

  torch::nn::AnyModule module_;
  std::shared_ptr<const ModulePolicy> policy_;
};

}  // namespace TORCHAMP_NAMESPACE::detail

/// Holds a PolicyEntry in a torch::nn::AnyModule as the module that it replaces.
template <>
struct torch::nn::AnyModuleHolder<torchamp::detail::PolicyEntry, int> final
    : torch::nn::AnyModulePlaceholder {
  explicit AnyModuleHolder(std::shared_ptr<torchamp::detail::PolicyEntry>&& entry)
      : AnyModulePlaceholder(typeid(torchamp::detail::PolicyEntry)), module(std::move(entry)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override { return module->run(arguments); }

  std::shared_ptr<Module> ptr() override { return module->module().ptr(); }

  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<AnyModuleHolder>(*this);
  }

  // As with WithPolicy, a clone has no policy.
  std::unique_ptr<AnyModulePlaceholder> clone_module(
      std::optional<torch::Device> device) const override {
    torch::nn::AnyModule clone = module->module().clone(device);
    return std::move(clone.*torchamp::detail::any_module_content());
  }

  std::shared_ptr<torchamp::detail::PolicyEntry> module;
};

namespace TORCHAMP_NAMESPACE::detail {

/// A module of a model, and how its forward can get a policy.
struct ForwardSite {
  torch::nn::Module* module;
  std::string name;                            // the first, if it is registered more than once
  PolicyHolder* holder;                        // if it is a WithPolicy
  std::vector<torch::nn::AnyModule*> entries;  // if it is an entry of Sequentials
  torch::nn::SequentialImpl* sequential;       // if it is a Sequential: its entries get the policy
  std::size_t names;                           // the number of its names

  /// Whether anything but a Sequential may call it.
  bool may_be_called_directly() const { return names > entries.size(); }

  bool reachable() const { return holder != nullptr || !entries.empty() || sequential != nullptr; }

  /// Whether it only holds modules and is never called.
  bool is_container() const {
    return dynamic_cast<torch::nn::ModuleListImpl*>(module) != nullptr ||
           dynamic_cast<torch::nn::ModuleDictImpl*>(module) != nullptr;
  }

  /// Sets the module's policy, or removes it (null).
  void put(const std::shared_ptr<const PolicyData>& policy) const {
    if (holder != nullptr) {
      holder->set_module_policy(std::make_shared<const ModulePolicy>(ModulePolicy{name, policy}));
      return;
    }
    for (torch::nn::AnyModule* entry : entries) {
      if (entry->type_info() == typeid(PolicyEntry)) {
        *entry = torch::nn::AnyModule(entry->get<PolicyEntry>().module());
      }
      if (!policy) continue;
      *entry = torch::nn::AnyModule(std::make_shared<PolicyEntry>(
          *entry, std::make_shared<const ModulePolicy>(ModulePolicy{name, policy})));
    }
  }
};

/// The sites of a model, in the order of its modules; the model itself comes first, without a name.
/// Error: a Sequential that calls a module which is not registered with it.
class ForwardSites {
 public:
  explicit ForwardSites(torch::nn::Module& model) {
    add("", model);
    for (const auto& item : model.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
      add(item.key(), *item.value());
    }
    for (const auto& site : sites_) {
      if (site.sequential == nullptr) continue;
      check_all_registered(site);
      for (torch::nn::AnyModule& entry : *site.sequential) {
        sites_[index_.at(entry.ptr().get())].entries.push_back(&entry);
      }
    }
  }

  /// All dotted names with the index of their module's site.
  const std::vector<std::pair<std::string, std::size_t>>& names() const { return names_; }
  const ForwardSite& operator[](std::size_t index) const { return sites_[index]; }
  std::size_t size() const { return sites_.size(); }
  std::size_t index_of(const torch::nn::AnyModule& entry) const {
    return index_.at(entry.ptr().get());
  }

 private:
  void add(std::string name, torch::nn::Module& module) {
    const auto [found, is_new] = index_.try_emplace(&module, sites_.size());
    names_.emplace_back(name, found->second);
    if (!is_new) {
      ++sites_[found->second].names;
      return;
    }
    sites_.push_back({&module,
                      std::move(name),
                      dynamic_cast<PolicyHolder*>(&module),
                      {},
                      dynamic_cast<torch::nn::SequentialImpl*>(&module),
                      /*names=*/1});
  }

  static void check_all_registered(const ForwardSite& site) {
    std::set<const torch::nn::Module*> children;
    for (const auto& child : site.sequential->children()) children.insert(child.get());
    std::size_t place = 0;
    for (const torch::nn::AnyModule& entry : *site.sequential) {
      TORCH_CHECK(children.contains(entry.ptr().get()),
                  "ModulePolicies::apply_to: the Sequential '", site.name, "' calls a ",
                  entry.ptr()->name(), " (its entry ", place,
                  ") that is not registered with it. Was it replaced with replace_module? A "
                  "Sequential still calls the old module: make a new Sequential.");
      ++place;
    }
  }

  std::vector<ForwardSite> sites_;
  std::vector<std::pair<std::string, std::size_t>> names_;
  std::map<const torch::nn::Module*, std::size_t> index_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
