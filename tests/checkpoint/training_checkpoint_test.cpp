// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/training_checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "torchamp/autocast.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"

namespace {

namespace fs = std::filesystem;
using at::Tensor;
using torchamp::TrainingCheckpoint;

/// A run with everything that has a state: dropout, batch norm, a fused optimizer, a scaler,
/// masters.
template <class Optimizer, class Options>
struct Run {
  explicit Run(const fs::path& file, bool half) : checkpoint(file) {
    if (half) {
      masters.emplace(net, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
      optimizer = std::make_unique<Optimizer>(masters->parameters(), Options(0.05));
      checkpoint.add("model", *masters);
    } else {
      optimizer = std::make_unique<Optimizer>(net->parameters(), Options(0.05));
      checkpoint.add("model", net);
    }
    checkpoint.add("optimizer", *optimizer).add("scaler", scaler).add("step", step);
    checkpoint.add_local("losses", losses);
  }

  void train(std::int64_t until) {
    for (; step < until; ++step) {
      optimizer->zero_grad();
      Tensor loss;
      {
        const torchamp::AutocastGuard autocast(at::kCPU);
        loss = net->forward(at::randn({6, 4})).to(at::kFloat).pow(2).mean();
      }
      losses += loss.item<double>();
      scaler.scale(loss).backward();
      if (masters) masters->take_gradients();
      scaler.step(*optimizer);
      scaler.update();
      if (masters) masters->copy_to_model();
    }
  }

  std::vector<Tensor> state() {
    std::vector<Tensor> tensors = net->parameters();
    for (const Tensor& buffer : net->buffers()) tensors.push_back(buffer);
    if (masters) {
      for (const Tensor& master : masters->parameters()) tensors.push_back(master);
    }
    tensors.push_back(at::tensor({scaler.get_scale(), losses}));
    return tensors;
  }

  torch::nn::Sequential net{torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8),
                            torch::nn::Dropout(0.5), torch::nn::Linear(8, 2)};
  std::optional<torchamp::MasterWeights> masters;
  std::unique_ptr<Optimizer> optimizer;
  torchamp::GradScaler scaler{{.init_scale = 64., .growth_interval = 3}};
  std::int64_t step = 0;
  double losses = 0.;
  TrainingCheckpoint checkpoint;
};

template <class Optimizer, class Options>
void expect_to_go_on_bit_for_bit(bool half) {
  const TemporaryFolder folder;
  using ThisRun = Run<Optimizer, Options>;
  at::manual_seed(11);
  ThisRun straight(folder / "straight.pt", half);
  straight.train(8);

  at::manual_seed(11);
  {
    ThisRun first(folder / "run.pt", half);
    EXPECT_FALSE(first.checkpoint.load());
    first.train(4);
    first.checkpoint.save();
    first.train(6);  // comes to nothing
  }
  at::manual_seed(99);
  ThisRun second(folder / "run.pt", half);
  second.train(2);
  EXPECT_TRUE(second.checkpoint.load());
  EXPECT_EQ(second.step, 4);
  second.train(8);
  const auto a = straight.state(), b = second.state();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(TrainingCheckpoint, GoesOnBitForBit) {
  expect_to_go_on_bit_for_bit<torch::optim::Adam, torch::optim::AdamOptions>(false);
  expect_to_go_on_bit_for_bit<torchamp::FusedAdamW, torch::optim::AdamWOptions>(false);
  expect_to_go_on_bit_for_bit<torchamp::FusedAdamW, torch::optim::AdamWOptions>(true);
}

TEST(TrainingCheckpoint, HoldsNumbersStringsAndTensors) {
  const TemporaryFolder folder;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  int whole = 3;
  float real = 0.5f;
  bool flag = true;
  std::string text = "a\nb";
  Tensor tensor = at::arange(3);
  checkpoint.add("class", whole).add("real", real).add("flag", flag).add("text", text);
  checkpoint.add_local("tensor", tensor);
  checkpoint.save();
  whole = 0, real = 0.f, flag = false, text = "", tensor.fill_(9);
  EXPECT_TRUE(checkpoint.load());
  EXPECT_EQ(whole, 3);
  EXPECT_EQ(real, 0.5f);
  EXPECT_TRUE(flag);
  EXPECT_EQ(text, "a\nb");
  EXPECT_TRUE(at::equal(tensor, at::arange(3)));
  EXPECT_ERROR(checkpoint.add("flag", whole), "there is a 'flag' already");
  EXPECT_ERROR(checkpoint.add_local("flag", whole), "there is a 'flag' already");
}

TEST(TrainingCheckpoint, LeavesEverythingUnchangedIfTheFileDoesNotFit) {
  const TemporaryFolder folder;
  const auto save = [&](std::int64_t width, at::ScalarType dtype) {
    torch::nn::Linear net(4, width);
    net->to(dtype);
    torch::optim::Adam optimizer(net->parameters());
    std::int64_t step = 7;
    TrainingCheckpoint(folder / "run.pt")
        .add("step", step)
        .add("model", net)
        .add("optimizer", optimizer)
        .save();
  };
  torch::nn::Linear net(4, 2);
  torch::optim::Adam optimizer(net->parameters());
  net->forward(at::ones({1, 4})).sum().backward();
  optimizer.step();
  const Tensor weight = net->weight.detach().clone();
  std::int64_t step = 1;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add("model", net).add("optimizer", optimizer);
  at::manual_seed(1);
  const auto expect_refused = [&](const std::string& text) {
    EXPECT_ERROR((void)checkpoint.load(), text);
    EXPECT_EQ(step, 1);
    EXPECT_TRUE(at::equal(net->weight, weight));
    EXPECT_EQ(optimizer.state().size(), 2u);
  };
  save(3, at::kFloat);
  expect_refused(
      "'model' in '" + (folder / "run.pt").string() +
      "' does not fit: 'weight' is float [3, 4] in the file and float [2, 4] in the model");
  save(2, at::kHalf);
  expect_refused("'weight' is c10::Half [2, 4] in the file and float [2, 4] in the model");
  torch::save(net, (folder / "run.pt").string());
  expect_refused("was not written by TrainingCheckpoint::save");
  std::ofstream(folder / "run.pt") << "nonsense";
  expect_refused("it is damaged: it is no zip file, or is cut off");
  save(2, at::kFloat);
  TrainingCheckpoint more(folder / "run.pt");
  more.add("other", step);
  EXPECT_ERROR((void)more.load(), "holds no 'other'. Add the same objects as when it was saved.");
  EXPECT_ERROR((void)checkpoint.load(0, 2), "was saved by 1 process(es), and this run has 2");
  EXPECT_TRUE(checkpoint.load_shared());
  EXPECT_EQ(step, 7);
}

}  // namespace
