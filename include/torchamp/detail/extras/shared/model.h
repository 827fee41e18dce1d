// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <concepts>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/shared/script_module.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A module, a pointer to one, a holder, or a TorchScript module. A module of the program's own,
/// without a shared pointer, must outlive it.
class Model {
 public:
  template <class Module>
  Model(const torch::nn::ModuleHolder<Module>& holder) : module_(holder.ptr()) {}
  template <std::derived_from<torch::nn::Module> Module>
  Model(std::shared_ptr<Module> module) : module_(std::move(module)) {}
  Model(torch::nn::Module& module) : module_(module.weak_from_this().lock()) {
    if (!module_) module_ = {std::shared_ptr<void>(), &module};
  }

  Model(const torch::jit::Module& script) : module_(ScriptModule::of(script)) {}

  const std::shared_ptr<torch::nn::Module>& get() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

/// A record of some models: the modes (train() or eval()) of all modules, the memory of parameters
/// and buffers, and which of them require gradients.
class SeenModels {
 public:
  SeenModels() = default;
  explicit SeenModels(const std::vector<Model>& models) {
    for (const Model& model : models) {
      add(model.get());
      for (const auto& module : model.get()->modules(/*include_self=*/false)) add(module);
      for (const at::Tensor& parameter : model.get()->parameters()) add(parameter);
      for (const at::Tensor& buffer : model.get()->buffers()) add(buffer);
    }
  }

  void add(const at::Tensor& tensor) {  // once: an optimizer and a model share parameters
    if (!known_.insert(tensor.unsafeGetTensorImpl()).second) return;
    tensors_.push_back({tensor, address_of(tensor), tensor.requires_grad()});
  }

  /// Whether nothing has changed since.
  bool hold() const {
    return std::ranges::all_of(
               modes_, [](const auto& one) { return one.first->is_training() == one.second; }) &&
           std::ranges::all_of(tensors_, [](const SeenMemory& one) {
             return one.address == address_of(one.tensor) &&
                    one.requires_grad == one.tensor.requires_grad();
           });
  }

 private:
  struct SeenMemory {
    at::Tensor tensor;
    const void* address;
    bool requires_grad;
  };

  static const void* address_of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? tensor.storage().data() : nullptr;
  }

  void add(const std::shared_ptr<torch::nn::Module>& module) {
    modes_.emplace_back(module, module->is_training());
  }

  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
  std::vector<SeenMemory> tensors_;
  std::unordered_set<const c10::TensorImpl*> known_;  // of tensors_, which keep them
};

}  // namespace TORCHAMP_NAMESPACE::detail
