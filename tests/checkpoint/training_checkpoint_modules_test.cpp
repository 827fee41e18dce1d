// SPDX-License-Identifier: BSD-3-Clause
// Modules in a TrainingCheckpoint: tensors that are filled in place, and modules that do not fit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "torchamp/master_weights.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using torchamp::TrainingCheckpoint;

TEST(TrainingCheckpointValues, FillsAModelsWeightsInPlace) {
  const TemporaryFolder folder;
  torch::nn::BatchNorm1d net(3);
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("model", net);
  checkpoint.save();
  const Tensor view = net->weight.detach(), mean = net->running_mean.detach();
  const at::NoGradGuard no_grad;
  net->weight.fill_(7.), net->running_mean.fill_(7.);
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(at::equal(view, at::ones({3})));
  EXPECT_TRUE(view.is_alias_of(net->weight));
  EXPECT_TRUE(at::equal(mean, at::zeros({3})));
  EXPECT_TRUE(mean.is_alias_of(net->running_mean));
}

TEST(TrainingCheckpointValues, KeepsHooksOnTheNodesThatAccumulateGradients) {
  const TemporaryFolder folder;
  torch::nn::Linear net(3, 1);
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("model", net);
  checkpoint.save();
  // as a DistributedDataParallel holds them
  const auto accumulator = torch::autograd::impl::grad_accumulator(net->weight);
  EXPECT_TRUE(checkpoint.load());
  EXPECT_EQ(torch::autograd::impl::try_get_grad_accumulator(net->weight), accumulator);
  net(at::ones({2, 3})).sum().backward();
  EXPECT_TRUE(at::equal(net->weight.grad(), at::full({1, 3}, 2.)));
}

/// Some layers, the first of them within another module.
struct Layers final : torch::nn::Module {
  Layers(int count, bool bias) {
    const auto layer = [bias] {
      return torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(bias));
    };
    register_module("inner", torch::nn::Sequential(layer()));
    for (int i = 1; i < count; ++i) register_module("layer" + std::to_string(i), layer());
  }
};

TEST(TrainingCheckpointValues, RefusesAModelOfWhichTheFileHasMoreLayersOrWeights) {
  const TemporaryFolder folder;
  const auto saved = std::make_shared<Layers>(3, true);
  TrainingCheckpoint(folder / "run.pt").add("model", saved).save();
  const auto expect = [&](const std::shared_ptr<Layers>& model, const std::string& names) {
    const Tensor weight = model->parameters()[0].detach().clone();
    TrainingCheckpoint checkpoint(folder / "run.pt");
    checkpoint.add("model", *model);
    EXPECT_ERROR((void)checkpoint.load(),
                 "TrainingCheckpoint::load: 'model' in '" + (folder / "run.pt").string() +
                     "' does not fit: it has entries that the program's model lacks: " + names);
    EXPECT_TRUE(at::equal(model->parameters()[0], weight));
  };
  expect(std::make_shared<Layers>(1, true), "layer1, layer2");
  expect(std::make_shared<Layers>(3, false), "inner.0.bias, layer1.bias, layer2.bias");
}

TEST(TrainingCheckpointValues, RefusesAModelOfWhichTheFileHasFewerLayers) {
  const TemporaryFolder folder;
  const auto saved = std::make_shared<Layers>(1, true), model = std::make_shared<Layers>(2, true);
  TrainingCheckpoint(folder / "run.pt").add("model", saved).save();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("model", *model);
  const Tensor weight = model->parameters()[0].detach().clone();
  EXPECT_ERROR((void)checkpoint.load(),
               "TrainingCheckpoint::load: 'model' in '" + (folder / "run.pt").string() +
                   "' does not fit: it lacks entries of the program's model: layer1.weight, "
                   "layer1.bias");
  EXPECT_TRUE(at::equal(model->parameters()[0], weight));
}

/// Saves its state by its own save().
struct OwnSave final : torch::nn::Module {
  Tensor weight = register_parameter("weight", at::ones({2}));
  int64_t count = 0;
  void save(torch::serialize::OutputArchive& archive) const override {
    Module::save(archive);
    archive.write("count", c10::IValue(count));
  }
  void load(torch::serialize::InputArchive& archive) override {
    Module::load(archive);
    c10::IValue value;
    archive.read("count", value);
    count = value.toInt();
  }
};

struct OwnSaveWithin final : torch::nn::Module {
  std::shared_ptr<OwnSave> own = register_module("own", std::make_shared<OwnSave>());
};

TEST(TrainingCheckpointValues, LoadsAModuleThatSavesMoreThanItsWeights) {
  const TemporaryFolder folder;
  const auto saved = std::make_shared<OwnSaveWithin>(), loaded = std::make_shared<OwnSaveWithin>();
  saved->own->count = 5;
  TrainingCheckpoint(folder / "run.pt").add("model", saved).save();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("model", loaded);
  EXPECT_TRUE(checkpoint.load());
  EXPECT_EQ(loaded->own->count, 5);
}

TEST(TrainingCheckpointValues, FillsABufferOfWhichManyElementsAreOne) {
  struct Expanded : torch::nn::Module {
    explicit Expanded(double value) {
      buffer = register_buffer("buffer", at::full({1}, value).expand({4}));
    }
    Tensor buffer;
  };
  const TemporaryFolder folder;
  Expanded saved(1.), module(2.);
  TrainingCheckpoint(folder / "run.pt").add("module", saved).save();
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("module", module).load());
  EXPECT_TRUE(at::equal(module.buffer, at::ones({4})));
}

/// Cannot be loaded, and notices late.
struct Unloadable final : torch::nn::Module {
  Tensor mask = register_buffer("mask", at::ones({1}).expand({4}));
  Tensor statistics = register_buffer("statistics", at::zeros({2}));
  void load(torch::serialize::InputArchive& /*archive*/) override {
    statistics.fill_(7.);
    throw std::runtime_error("no");
  }
};

TEST(TrainingCheckpointValues, BringsBackWhatFollowsABufferOfWhichManyElementsAreOne) {
  const TemporaryFolder folder;
  Unloadable module;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("module", module).save();
  EXPECT_ERROR((void)checkpoint.load(), "'module' in ");
  EXPECT_TRUE(at::equal(module.statistics, at::zeros({2})));
}

TEST(TrainingCheckpointValues, LeavesMastersOfSuchAModelUnchanged) {
  const TemporaryFolder folder;
  const auto model = std::make_shared<Unloadable>();
  const Tensor weight = model->register_parameter("weight", at::ones({2}));
  torchamp::MasterWeights masters(model, {.dtype = at::kBFloat16});
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("masters", masters).save();
  EXPECT_ERROR((void)checkpoint.load(), "MasterWeights::load: several elements of 'mask'");
  masters.take_gradients();  // the model has the masters' values
}

}  // namespace
