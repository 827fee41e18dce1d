// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/io/archives.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/modules.h>
#include <torch/nn/modules/container/sequential.h>

#include <sstream>
#include <string>
#include <vector>

namespace {

using Names = std::vector<std::string>;
namespace nn = torch::nn;

/// The names of what an archive holds, as a reader of TorchScript's files sees them.
Names names_in(torch::serialize::OutputArchive& archive) {
  std::stringstream bytes;
  archive.save_to(bytes);
  const torch::jit::Module module = torch::jit::load(bytes);
  Names names;
  for (const auto& item : module.named_parameters()) names.push_back("parameter " + item.name);
  for (const auto& item : module.named_buffers()) names.push_back("buffer " + item.name);
  for (const auto& item : module.named_modules()) names.push_back("module " + item.name);
  return names;
}

TEST(ModuleArchive, HoldsWhatLibTorchsOwnDoes) {
  const nn::Sequential model(nn::Linear(2, 2), nn::Functional(torch::relu), nn::BatchNorm1d(2));
  torch::serialize::OutputArchive own, libtorchs;
  torchamp::detail::write_module(*model, own,
                                 [](const at::Tensor& parameter) { return parameter.detach(); });
  model->save(libtorchs);
  const Names names = names_in(libtorchs);
  EXPECT_EQ(names_in(own), names);
  EXPECT_EQ(names.size(), 4U + 3U + 3U) << "of all kinds, and none for the function";
}

}  // namespace
