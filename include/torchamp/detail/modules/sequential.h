// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/modules/forward_scope.h"

namespace torchamp::detail {

// Note [Entries of a Sequential]
// torch::nn::Sequential calls its modules through torch::nn::AnyModule, which calls them through a
// virtual function of torch::nn::AnyModuleHolder. So an entry of a Sequential can be put under a
// policy from outside: it is replaced by an AnyModule that holds the former one and calls it in a
// ForwardScope. Only the way to the module changes. The module itself stays the one registered with
// the Sequential: its name, parameters and place in a checkpoint do, and so do Sequential::ptr(i)
// and operator[]. AnyModule::get and Sequential::at, which ask for the exact type that an AnyModule
// was made with, fail with LibTorch's error for a wrong type.
//
// A clone has no policy, so it gets back the entry that was replaced: the AnyModulePlaceholder that
// an AnyModule holds. AnyModule has no access to it. A template argument of an explicit
// instantiation may name a private member, and a friend function can give it away.

using AnyModuleContent = std::unique_ptr<torch::nn::AnyModulePlaceholder> torch::nn::AnyModule::*;
inline AnyModuleContent any_module_content();
template <AnyModuleContent content>
struct AnyModuleContentOf {
  friend inline AnyModuleContent any_module_content() { return content; }
};
template struct AnyModuleContentOf<&torch::nn::AnyModule::content_>;

/// What stands in for an entry of a Sequential.
class SequentialEntry : public torch::nn::Module {
 public:
  SequentialEntry(torch::nn::AnyModule module, std::shared_ptr<const ModulePolicy> policy)
      : module_(std::move(module)), policy_(std::move(policy)) {}

  const torch::nn::AnyModule& module() const { return module_; }

  torch::nn::AnyValue run(std::vector<torch::nn::AnyValue>& arguments) {
    const ForwardScope scope(policy_.get());
    return call<0>(arguments);
  }

  /// Never called: AnyModule finds the arguments' types in it.
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

}  // namespace torchamp::detail

/// How torch::nn::AnyModule holds a SequentialEntry: as the module that it stands in for.
template <>
struct torch::nn::AnyModuleHolder<torchamp::detail::SequentialEntry, int> final
    : torch::nn::AnyModulePlaceholder {
  explicit AnyModuleHolder(std::shared_ptr<torchamp::detail::SequentialEntry>&& entry)
      : AnyModulePlaceholder(typeid(torchamp::detail::SequentialEntry)), module(std::move(entry)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override { return module->run(arguments); }

  std::shared_ptr<Module> ptr() override { return module->module().ptr(); }

  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<AnyModuleHolder>(*this);
  }

  // As WithPolicy: a clone has no policy.
  std::unique_ptr<AnyModulePlaceholder> clone_module(
      std::optional<torch::Device> device) const override {
    torch::nn::AnyModule clone = module->module().clone(device);
    return std::move(clone.*torchamp::detail::any_module_content());
  }

  std::shared_ptr<torchamp::detail::SequentialEntry> module;
};
