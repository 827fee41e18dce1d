// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <string>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Writes what torch::nn::Module::save writes, with value_of(parameter) for each parameter.
template <class ValueOf>
void write_module(const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
                  const ValueOf& value_of) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    archive.write(item.key(), value_of(item.value()));
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    archive.write(item.key(), item.value(), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    write_module(*child.value(), nested, value_of);
    archive.write(child.key(), nested);
  }
}

/// Calls visit(name, tensor, value) for each parameter and buffer of `module`, with what the
/// archive holds under its name; undefined if nothing.
template <class Visit>
void read_module(const torch::nn::Module& module, torch::serialize::InputArchive& archive,
                 const Visit& visit, const std::string& prefix = "") {
  const auto read = [&](const std::string& key, const at::Tensor& tensor, bool is_buffer) {
    at::Tensor value;
    archive.try_read(key, value, is_buffer);
    visit(prefix + key, tensor, value);
  };
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    read(item.key(), item.value(), false);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    read(item.key(), item.value(), true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::InputArchive nested;
    archive.try_read(child.key(), nested);
    read_module(*child.value(), nested, visit, prefix + child.key() + '.');
  }
}

}  // namespace torchamp::detail
