// SPDX-License-Identifier: BSD-3-Clause
// Weights that go to a Python of this machine and come back.
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_step.h>

#include <fstream>
#include <string>
#include <vector>

#include "support/python.h"
#include "support/temporary_folder.h"

namespace {

using at::Tensor;
using TensorDict = c10::Dict<std::string, Tensor>;

TensorDict weights_of(const torch::nn::Module& model) {
  TensorDict weights;
  for (const auto& item : model.named_parameters()) {
    weights.insert(item.key(), item.value().detach());
  }
  for (const auto& item : model.named_buffers()) weights.insert(item.key(), item.value());
  return weights;
}

void write_pickle(const TensorDict& dict, const std::string& path) {
  const std::vector<char> bytes = torch::pickle_save(dict);
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

c10::impl::GenericDict read_pickle(const std::string& path) {
  const std::string bytes = content_of(path);
  return torch::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
}

torch::nn::Sequential small_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8),
                               torch::nn::Tanh(), torch::nn::Linear(8, 1));
}

}  // namespace

TEST(PythonWeights, GoToPythonAfterATrainingHereAndComeBack) {
  const Answer found = python("-c 'import torch; torch.amp.GradScaler'");
  if (found.status != 0) {
    GTEST_SKIP() << "no Python with torch (set TORCHAMP_TEST_PYTHON to one): " << found.output;
  }
  const TemporaryFolder folder;
  const auto path = [&](const std::string& name) { return (folder / name).string(); };
  torch::manual_seed(0);
  torch::nn::Sequential model = small_net();
  torchamp::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  torchamp::TrainingStep train(model, optimizer, {.dtype = torch::kBFloat16});
  const Tensor x = torch::randn({16, 4});
  for (int i = 0; i < 3; ++i) train([&] { return model->forward(x).sin().mean(); });
  model->eval();
  const Tensor output = model->forward(x).detach();
  torch::save(model, path("model.pt"));
  write_pickle(weights_of(*model), path("weights.pt"));
  TensorDict input;
  input.insert("input", x);
  write_pickle(input, path("input.pt"));

  const Answer run = python("parity/weights.py '" + path("") + "'");
  ASSERT_EQ(run.status, 0) << run.output;
  EXPECT_NE(run.output.find("exchanged 9"), std::string::npos) << run.output;

  const auto outputs = read_pickle(path("outputs.pt"));
  EXPECT_TRUE(torch::allclose(outputs.at("before").toTensor(), output, 1e-5, 1e-6));
  torch::nn::Sequential returned = small_net();
  const auto weights = read_pickle(path("python.pt"));
  {
    const torch::NoGradGuard no_grad;
    const auto fill = [&](auto named) {
      for (auto& item : named) item.value().copy_(weights.at(item.key()).toTensor());
    };
    fill(returned->named_parameters());
    fill(returned->named_buffers());
  }
  returned->eval();
  const Tensor after = outputs.at("after").toTensor();
  EXPECT_TRUE(torch::allclose(returned->forward(x), after, 1e-5, 1e-6));
  EXPECT_FALSE(torch::allclose(after, output, 1e-5, 1e-6)) << "Python has trained";
  torch::jit::Module scripted = torch::jit::load(path("scripted.pt"));
  EXPECT_TRUE(torch::allclose(scripted.forward({x}).toTensor(), after, 1e-5, 1e-6));
}
