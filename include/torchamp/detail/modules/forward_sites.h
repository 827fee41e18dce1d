// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/modules/forward_scope.h"
#include "torchamp/detail/modules/sequential.h"
#include "torchamp/detail/modules/with_policy.h"

namespace torchamp::detail {

/// A module of a model, and where its forward can be put under a policy.
struct PolicySite {
  torch::nn::Module* module;
  std::string name;                            // the first, if it is registered more than once
  PolicyHolder* holder;                        // it is a WithPolicy
  std::vector<torch::nn::AnyModule*> entries;  // it is an entry of these Sequentials'
  torch::nn::SequentialImpl* sequential;       // it is one: its entries are reached
  std::size_t names;                           // how many it has

  /// Whether something other than a Sequential may call it.
  bool may_be_called_directly() const { return names > entries.size(); }

  bool reachable() const { return holder != nullptr || !entries.empty() || sequential != nullptr; }

  /// Whether it only holds modules and is never called.
  bool is_container() const {
    return dynamic_cast<torch::nn::ModuleListImpl*>(module) != nullptr ||
           dynamic_cast<torch::nn::ModuleDictImpl*>(module) != nullptr;
  }

  /// Gives the module a policy, or, with a null one, takes its policy away.
  void put(const std::shared_ptr<const PolicyData>& policy) const {
    if (holder != nullptr) {
      holder->set_module_policy(std::make_shared<const ModulePolicy>(ModulePolicy{name, policy}));
      return;
    }
    for (torch::nn::AnyModule* entry : entries) {
      if (entry->type_info() == typeid(SequentialEntry)) {
        *entry = torch::nn::AnyModule(entry->get<SequentialEntry>().module());
      }
      if (!policy) continue;
      *entry = torch::nn::AnyModule(std::make_shared<SequentialEntry>(
          *entry, std::make_shared<const ModulePolicy>(ModulePolicy{name, policy})));
    }
  }
};

/// The sites of a model, in the order of its modules; the model itself comes first, without a name.
/// Error: a Sequential that calls a module which is not registered with it.
class PolicySites {
 public:
  explicit PolicySites(torch::nn::Module& model) {
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
  const PolicySite& operator[](std::size_t index) const { return sites_[index]; }
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

  static void check_all_registered(const PolicySite& site) {
    const auto children = site.sequential->children();
    std::size_t place = 0;
    for (const torch::nn::AnyModule& entry : *site.sequential) {
      const bool registered =
          std::find(children.begin(), children.end(), entry.ptr()) != children.end();
      TORCH_CHECK(registered, "ModulePolicies::apply_to: the Sequential '", site.name, "' calls a ",
                  entry.ptr()->name(), " (its entry ", place,
                  ") that is not registered with it. Was it replaced with replace_module? A "
                  "Sequential goes on calling the former module: make the Sequential anew.");
      ++place;
    }
  }

  std::vector<PolicySite> sites_;
  std::vector<std::pair<std::string, std::size_t>> names_;
  std::map<const torch::nn::Module*, std::size_t> index_;
};

}  // namespace torchamp::detail
