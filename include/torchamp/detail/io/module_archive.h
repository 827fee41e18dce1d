// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/tensors.h"
#include "torchamp/detail/text.h"
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

/// The keys at the top of what module.save() writes.
inline std::set<std::string> keys_that_saving_writes(const torch::nn::Module& module) {
  torch::serialize::OutputArchive written;
  module.save(written);
  std::ostringstream bytes;
  written.save_to(bytes);
  const std::string text = std::move(bytes).str();
  torch::serialize::InputArchive archive;
  archive.load_from(text.data(), text.size());
  const std::vector<std::string> keys = archive.keys();
  return {keys.begin(), keys.end()};
}

/// What the archive of a module holds that saving `module` would not write, by dotted names.
inline std::vector<std::string> left_over(const torch::nn::Module& module,
                                          torch::serialize::InputArchive& archive,
                                          const std::string& prefix = "") {
  std::set<std::string> known;
  for (const auto& item : module.named_parameters(/*recurse=*/false)) known.insert(item.key());
  for (const auto& item : module.named_buffers(/*recurse=*/false)) known.insert(item.key());
  std::vector<std::string> names;
  for (const auto& child : module.named_children()) {
    known.insert(child.key());
    torch::serialize::InputArchive nested;
    if (!child.value()->is_serializable() || !archive.try_read(child.key(), nested)) continue;
    for (std::string& name : left_over(*child.value(), nested, prefix + child.key() + '.')) {
      names.push_back(std::move(name));
    }
  }
  std::set<std::string> own;  // of a module with a save() of its own
  for (const std::string& key : archive.keys()) {
    if (known.contains(key)) continue;
    if (own.empty()) own = keys_that_saving_writes(module);
    if (!own.contains(key)) names.push_back(prefix + key);
  }
  return names;
}

/// Throws where the archive of a module holds more than `module` takes: layers or weights that the
/// program's model does not have, and that LibTorch passes over. `archive_name` begins the error.
inline void check_nothing_is_left(const torch::nn::Module& module,
                                  torch::serialize::InputArchive& archive,
                                  const char* archive_name) {
  const std::vector<std::string> names = left_over(module, archive);
  TORCH_CHECK(names.empty(), archive_name,
              " holds what the model in the program does not have: ", list_of(names));
}

/// Each parameter and buffer of `module`, with what the archive holds for it. Throws for one that
/// is missing, of another shape or cannot be filled, and where the archive holds more. For load()
/// of `masters`, a class that saves a model.
inline std::vector<std::pair<at::Tensor, at::Tensor>> read_all(
    const torch::nn::Module& module, torch::serialize::InputArchive& archive,
    const std::string& masters) {
  const std::string place = masters + "::load: ";
  const std::string remedy =
      ". Load what torch::save of these " + masters + ", or of such a model, has written.";
  std::vector<std::pair<at::Tensor, at::Tensor>> read;
  read_module(module, archive,
              [&](const std::string& name, const at::Tensor& to, const at::Tensor& from) {
                TORCH_CHECK(from.defined(), place, "the archive has no '", name, "'", remedy);
                TORCH_CHECK(from.sizes() == to.sizes(), place, "'", name, "' is ", from.sizes(),
                            " in the archive and ", to.sizes(), " in the model", remedy);
                TORCH_CHECK(!to.defined() || !repeats_elements(to), place, "several elements of '",
                            name, "' (sizes ", to.sizes(), ", strides ", to.strides(),
                            ") are one number in memory, as expand() gives them, which a file's "
                            "values cannot fill. Give it memory of its own: "
                            "tensor.set_data(tensor.contiguous()).");
                read.emplace_back(to, from);
              });
  check_nothing_is_left(module, archive, (place + "the archive").c_str());
  return read;
}

}  // namespace torchamp::detail
