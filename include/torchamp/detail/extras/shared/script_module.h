// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <memory>
#include <unordered_set>
#include <utility>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A TorchScript module as a module of torch::nn: it has the script's parameters and buffers under
/// the script's names, and its train() and eval() are the script's. A parameter, a buffer or a
/// submodule that the script has twice is registered once. Members that are added to the script or
/// replaced later are not registered.
class ScriptModule final : public torch::nn::Module {
 public:
  static std::shared_ptr<ScriptModule> of(const torch::jit::Module& script) {
    Known known;
    return std::make_shared<ScriptModule>(script, known);
  }

  using Known = std::unordered_set<const void*>;
  ScriptModule(torch::jit::Module script, Known& known) : script_(std::move(script)) {
    const auto is_new = [&known](const void* part) { return known.insert(part).second; };
    for (const auto& parameter : script_.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value;
      if (!is_new(tensor.unsafeGetTensorImpl())) continue;
      register_parameter(parameter.name, tensor, tensor.requires_grad());
    }
    for (const auto& buffer : script_.named_buffers(/*recurse=*/false)) {
      if (!is_new(buffer.value.unsafeGetTensorImpl())) continue;
      register_buffer(buffer.name, buffer.value);
    }
    for (const auto& child : script_.named_children()) {
      if (!is_new(child.value._ivalue().get())) continue;
      register_module(child.name, std::make_shared<ScriptModule>(child.value, known));
    }
  }

  void train(bool on = true) override { script_.train(on); }
  bool is_training() const noexcept override { return script_.is_training(); }

 private:
  torch::jit::Module script_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
