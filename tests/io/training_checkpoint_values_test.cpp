// SPDX-License-Identifier: BSD-3-Clause
// What a TrainingCheckpoint fills, in place and without narrowing, and what it refuses to name.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using torchamp::TrainingCheckpoint;

// ---- Tensors in place ---------------------------------------------------------------------------

TEST(TrainingCheckpointValues, KeepsATensorInItsOptimizersHands) {
  const TemporaryFolder folder;
  Tensor w = at::full({2}, 4.).requires_grad_();
  const Tensor handle = w;
  torch::optim::SGD optimizer({w}, 0.5);
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("w", w).add("optimizer", optimizer);
  checkpoint.save();
  w.mutable_grad() = at::ones({2});
  optimizer.step();
  const void* const storage = w.const_data_ptr();
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(w.is_same(handle));
  EXPECT_EQ(w.const_data_ptr(), storage);
  EXPECT_TRUE(w.requires_grad());
  optimizer.step();
  EXPECT_TRUE(at::equal(w.detach(), at::full({2}, 3.5)));
}

TEST(TrainingCheckpointValues, KeepsHandlesAndValuesWhereALaterObjectDoesNotFit) {
  const TemporaryFolder folder;
  Tensor w = at::ones({2}), once_none, once_some = at::ones({3});
  std::int64_t step = 1;
  TrainingCheckpoint saved(folder / "run.pt");
  Tensor some = at::full({3}, 2.), none;
  std::string text = "no number";
  saved.add("w", w).add("a", some).add("b", none).add("step", text).save();
  w.fill_(5.);
  const Tensor handle = w, other = once_some;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("w", w).add("a", once_none).add("b", once_some).add("step", step);
  EXPECT_ERROR(checkpoint.load(), "'step' in '" + (folder / "run.pt").string() +
                                      "' does not fit: it is a String in the file");
  EXPECT_TRUE(w.is_same(handle));
  EXPECT_TRUE(at::equal(w, at::full({2}, 5.)));
  EXPECT_FALSE(once_none.defined());
  EXPECT_TRUE(once_some.is_same(other));
  EXPECT_TRUE(at::equal(once_some, at::ones({3})));
  EXPECT_EQ(step, 1);
}

TEST(TrainingCheckpointValues, RefusesATensorOfAnotherShapeOrDtype) {
  const TemporaryFolder folder;
  Tensor w = at::ones({2, 3});
  TrainingCheckpoint(folder / "run.pt").add("w", w).save();
  for (Tensor other : {at::zeros({3, 2}), at::zeros({2, 3}, at::kHalf), at::zeros({6})}) {
    const Tensor before = other.clone(), handle = other;
    TrainingCheckpoint checkpoint(folder / "run.pt");
    checkpoint.add("w", other);
    EXPECT_ERROR(checkpoint.load(), "it is float [2, 3] in the file and ");
    EXPECT_TRUE(other.is_same(handle));
    EXPECT_TRUE(at::equal(other, before));
  }
}

TEST(TrainingCheckpointValues, KeepsWhatUndefinedMeansOnEitherSide) {
  const TemporaryFolder folder;
  Tensor some = at::arange(3), none;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("some", some).add("none", none);
  checkpoint.save();
  some.reset(), none = at::ones({2});
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(at::equal(some, at::arange(3)));
  EXPECT_FALSE(none.defined());
}

TEST(TrainingCheckpointValues, FillsAViewWhereItLies) {
  const TemporaryFolder folder;
  Tensor base = at::arange(12.).view({3, 4});
  Tensor column = base.select(1, 1);
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("column", column);
  checkpoint.save();
  base.zero_();
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(at::equal(base.select(1, 1), at::tensor({1., 5., 9.}, base.options())));
  EXPECT_EQ(base.sum().item<double>(), 15.);
}

// A captured graph, or a flat buffer that the weights are views of, holds their memory.
TEST(TrainingCheckpointValues, SavesOfAViewNoMoreThanItShows) {
  const TemporaryFolder folder;
  const Tensor large = at::rand({1 << 16});
  Tensor small = large.narrow(0, 7, 3).requires_grad_(), loaded;
  TrainingCheckpoint(folder / "run.pt").add("small", small).save();
  EXPECT_LT(std::filesystem::file_size(folder / "run.pt"), 16 << 10);
  TrainingCheckpoint(folder / "run.pt").add("small", loaded).load();
  EXPECT_TRUE(at::equal(loaded, small));
  EXPECT_TRUE(loaded.requires_grad());
}

TEST(TrainingCheckpointValues, FillsAModelsWeightsWhereTheyLie) {
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

// ---- Numbers ------------------------------------------------------------------------------------

/// Saves a value as one type and loads it as another.
template <class To, class From>
To through(From from) {
  const TemporaryFolder folder;
  TrainingCheckpoint(folder / "run.pt").add("value", from).save();
  To to{};
  TrainingCheckpoint(folder / "run.pt").add("value", to).load();
  return to;
}

template <class T>
void expect_limits() {
  using Limits = std::numeric_limits<T>;
  for (const T value : {Limits::lowest(), Limits::min(), Limits::max(), T{1}}) {
    EXPECT_EQ(through<T>(value), value);
  }
}

TEST(TrainingCheckpointValues, KeepsEveryNumberOfEveryType) {
  expect_limits<char>();
  expect_limits<signed char>();
  expect_limits<unsigned char>();
  expect_limits<std::int16_t>();
  expect_limits<std::uint32_t>();
  expect_limits<std::int64_t>();
  expect_limits<std::uint64_t>();
  expect_limits<float>();
  expect_limits<double>();
  EXPECT_EQ(through<std::int64_t>(std::uint8_t{200}), 200);
  EXPECT_TRUE(std::isnan(through<float>(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_EQ(through<float>(-std::numeric_limits<double>::infinity()),
            -std::numeric_limits<float>::infinity());
}

TEST(TrainingCheckpointValues, RefusesANumberThatItsTypeCannotHold) {
  EXPECT_ERROR(through<int>(std::int64_t{5'000'000'000}),
               "it is 5000000000 in the file, which an integer of 32 bits cannot hold");
  EXPECT_ERROR(through<std::int8_t>(128), "it is 128 in the file");
  EXPECT_ERROR(through<std::int16_t>(-40000), "it is -40000 in the file");
  EXPECT_ERROR(through<unsigned>(-1), "which an unsigned integer of 32 bits cannot hold");
  EXPECT_ERROR(through<std::uint64_t>(-1), "which an unsigned integer of 64 bits cannot hold");
  EXPECT_ERROR(through<std::int64_t>(std::numeric_limits<std::uint64_t>::max()),
               "it is 18446744073709551615 in the file");
  EXPECT_ERROR(through<int>(std::numeric_limits<std::uint64_t>::max()), "18446744073709551615");
  EXPECT_ERROR(through<float>(1e300), "it is 1e+300 in the file, which a float cannot hold");
  EXPECT_ERROR(through<float>(-1e300), "which a float cannot hold");
  EXPECT_ERROR(through<float>(1e-300), "it is 1e-300 in the file, which a float cannot hold");
  EXPECT_ERROR(through<int>(1.5), "it is a Double in the file and an integer in the program");
  EXPECT_ERROR(through<int>(true), "it is a Bool in the file and an integer in the program");
  EXPECT_ERROR(through<double>(1), "it is a Int in the file and a floating-point number");
  EXPECT_ERROR(through<bool>(1), "it is a Int in the file and a bool in the program");
  EXPECT_ERROR(through<std::string>(1), "it is a Int in the file and a string in the program");
  EXPECT_ERROR(through<Tensor>(1), "it is a Int in the file and a tensor in the program");
}

TEST(TrainingCheckpointValues, HoldsALongDoubleWithAllItsBits) {
  const auto third = 1.L / 3;
  EXPECT_EQ(through<long double>(third), third);
  EXPECT_EQ(through<long double>(0.5), 0.5L);
  EXPECT_EQ(through<double>(1.5L), 1.5);
  const long double infinite = std::numeric_limits<long double>::infinity();
  EXPECT_EQ(through<long double>(-infinite), -infinite);
}

// ---- Optimizers ---------------------------------------------------------------------------------

/// Three steps, a checkpoint, and two more, once straight and once in another program.
template <class Optimizer, class Options>
void expect_to_go_on(const Options& options) {
  const TemporaryFolder folder;
  const Tensor x = at::arange(12.).view({4, 3}).to(at::kFloat) / 10;
  const auto steps = [&](torch::nn::Linear& net, Optimizer& optimizer, int count) {
    for (int i = 0; i < count; ++i) {
      optimizer.step([&] {
        optimizer.zero_grad();
        const Tensor loss = (net->forward(x) - 1).pow(2).mean();
        loss.backward();
        return loss;
      });
    }
  };
  torch::nn::Linear first(3, 2), second(3, 2);
  Optimizer optimizer(first->parameters(), options), other(second->parameters(), options);
  steps(first, optimizer, 3);
  TrainingCheckpoint(folder / "run.pt").add("net", first).add("optimizer", optimizer).save();
  steps(first, optimizer, 2);
  steps(second, other, 1);
  TrainingCheckpoint(folder / "run.pt").add("net", second).add("optimizer", other).load();
  steps(second, other, 2);
  EXPECT_TRUE(at::equal(first->weight, second->weight));
  EXPECT_TRUE(at::equal(first->bias, second->bias));
}

TEST(TrainingCheckpointValues, GoesOnWithAnLbfgs) {
  using torch::optim::LBFGSOptions;
  expect_to_go_on<torch::optim::LBFGS>(LBFGSOptions(0.1).max_iter(2));
  expect_to_go_on<torch::optim::LBFGS>(
      LBFGSOptions(1.).max_iter(4).history_size(2).line_search_fn("strong_wolfe"));
}

TEST(TrainingCheckpointValues, SavesAnLbfgsThatHasFoundNothingToDo) {
  const TemporaryFolder folder;
  Tensor w = at::zeros({2}).requires_grad_();
  torch::optim::LBFGS optimizer({w}, torch::optim::LBFGSOptions(0.1));
  optimizer.step([&] {
    w.mutable_grad() = at::zeros({2});
    return at::zeros({});
  });
  EXPECT_EQ(optimizer.state().size(), 1U);
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("optimizer", optimizer);
  checkpoint.save();
  EXPECT_EQ(optimizer.state().size(), 1U) << "saving changes nothing";
  EXPECT_TRUE(checkpoint.load());
}

TEST(TrainingCheckpointValues, GoesOnWithAnAdagradFromAFusedOneThatHasNotStepped) {
  const TemporaryFolder folder;
  Tensor w = at::ones({2}).requires_grad_();
  const auto options = torch::optim::AdagradOptions(0.5).initial_accumulator_value(3.);
  torchamp::FusedAdagrad fused({w}, options);
  TrainingCheckpoint(folder / "run.pt").add("optimizer", fused).save();
  torch::optim::Adagrad optimizer({w}, torch::optim::AdagradOptions(0.1));
  TrainingCheckpoint(folder / "run.pt").add("optimizer", optimizer).load();
  w.mutable_grad() = at::ones({2});
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_TRUE(at::allclose(w.detach(), at::full({2}, 1 - 0.5 / 2)));
}

TEST(TrainingCheckpointValues, ReadsGroupsOfDifferentSizes) {
  const TemporaryFolder folder;
  const std::vector<Tensor> w{at::ones({2}).requires_grad_(), at::ones({3}).requires_grad_(),
                              at::ones({4}).requires_grad_()};
  const std::vector<torch::optim::OptimizerParamGroup> groups{{{w[0], w[1]}}, {{w[2]}}};
  for (const Tensor& one : w) one.mutable_grad() = at::ones_like(one);
  torch::optim::AdamW plain(groups, torch::optim::AdamWOptions(0.1));
  torchamp::FusedAdamW fused(groups, torch::optim::AdamWOptions(0.1));
  for (torch::optim::Optimizer* const optimizer :
       std::initializer_list<torch::optim::Optimizer*>{&plain, &fused}) {
    optimizer->step();
    TrainingCheckpoint checkpoint(folder / "run.pt");
    checkpoint.add("optimizer", *optimizer);
    checkpoint.save();
    optimizer->state().clear();
    EXPECT_TRUE(checkpoint.load());
    EXPECT_EQ(optimizer->state().size(), 3U);
  }
}

TEST(TrainingCheckpointValues, NamesTheOptimizerThatIsOfAnotherKind) {
  const TemporaryFolder folder;
  Tensor w = at::ones({2}).requires_grad_();
  w.mutable_grad() = at::ones({2});
  torch::optim::Adam adam({w}, torch::optim::AdamOptions(0.1));
  adam.step();
  TrainingCheckpoint(folder / "run.pt").add("optimizer", adam).save();
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.1).momentum(0.5));
  sgd.step();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("optimizer", sgd);
  const std::string does_not_fit = "TrainingCheckpoint::load: 'optimizer' in '" +
                                   (folder / "run.pt").string() + "' does not fit: ";
  EXPECT_ERROR(checkpoint.load(),
               does_not_fit +
                   "it holds the state of an Adam or AdamW, and the program's optimizer "
                   "is an SGD. Make the optimizer of the run that saved it, or do not "
                   "add this one: it then starts without state.");
  EXPECT_EQ(sgd.state().size(), 1U);
  TrainingCheckpoint(folder / "run.pt").add("optimizer", sgd).save();
  torchamp::FusedAdamW fused({w}, torch::optim::AdamWOptions(0.25));
  fused.step();
  TrainingCheckpoint of_fused(folder / "run.pt");
  of_fused.add("optimizer", fused);
  EXPECT_ERROR(of_fused.load(), does_not_fit +
                                    "it holds the state of an SGD, and the program's "
                                    "optimizer is an Adam or AdamW. Make");
  EXPECT_EQ(fused.state().size(), 1U);
  EXPECT_EQ(fused.param_groups()[0].options().get_lr(), 0.25);
}

/// Whose load and save throw what is no c10::Error.
struct Broken {
  void save(torch::serialize::OutputArchive&) const {
    if (saves_fail) throw std::runtime_error("no room");
  }
  void load(torch::serialize::InputArchive&) { throw std::out_of_range("no such thing"); }
  bool saves_fail = false;
};

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
    EXPECT_ERROR(
        checkpoint.load(),
        "TrainingCheckpoint::load: 'model' in '" + (folder / "run.pt").string() +
            "' does not fit: it holds what the model in the program does not have: " + names);
    EXPECT_TRUE(at::equal(model->parameters()[0], weight));
  };
  expect(std::make_shared<Layers>(1, true), "layer1, layer2");
  expect(std::make_shared<Layers>(3, false), "inner.0.bias, layer1.bias, layer2.bias");
}

TEST(TrainingCheckpointValues, RefusesAnOptimizerOfWhichTheFileHasMoreParameters) {
  const TemporaryFolder folder;
  torch::nn::Linear two(3, 3), one(torch::nn::LinearOptions(3, 3).bias(false));
  torch::optim::SGD saved(two->parameters(), 0.1), optimizer(one->parameters(), 0.1);
  TrainingCheckpoint(folder / "run.pt").add("optimizer", saved).save();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("optimizer", optimizer);
  EXPECT_ERROR(checkpoint.load(),
               "TrainingCheckpoint::load: 'optimizer' in '" + (folder / "run.pt").string() +
                   "' does not fit: it has parameter groups of [2] parameters, and the program's "
                   "optimizer [1]. Make model and optimizer those of the run that saved it, or do "
                   "not add this optimizer: it then starts without state.");
}

TEST(TrainingCheckpointValues, RefusesAModelOfWhichTheFileHasFewerLayers) {
  const TemporaryFolder folder;
  const auto saved = std::make_shared<Layers>(1, true), model = std::make_shared<Layers>(2, true);
  TrainingCheckpoint(folder / "run.pt").add("model", saved).save();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("model", *model);
  const Tensor weight = model->parameters()[0].detach().clone();
  EXPECT_ERROR(checkpoint.load(),
               "TrainingCheckpoint::load: 'model' in '" + (folder / "run.pt").string() +
                   "' does not fit: it lacks what the model in the program has: layer1.weight, "
                   "layer1.bias");
  EXPECT_TRUE(at::equal(model->parameters()[0], weight));
}

/// Saves what its state needs, by a save() of its own.
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

TEST(TrainingCheckpointValues, RefusesToSaveWithoutLocalPartsAndLeavesTheOldFile) {
  const TemporaryFolder folder;
  int64_t step = 3;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step);
  checkpoint.save();
  EXPECT_ERROR(checkpoint.save(std::vector<Tensor>{}),
               "TrainingCheckpoint::save: the list of local parts is empty");
  EXPECT_ERROR(checkpoint.save({checkpoint.local_part(), Tensor()}),
               "TrainingCheckpoint::save: local part 1 is not what local_part() gives");
  EXPECT_ERROR(checkpoint.save({at::ones({3})}), "local part 0 is not what");
  step = 0;
  EXPECT_TRUE(checkpoint.load());
  EXPECT_EQ(step, 3);
}

TEST(TrainingCheckpointValues, RefusesOptimizerStateOfAnotherShape) {
  const TemporaryFolder folder;
  torch::nn::Linear small(3, 2), large(7, 2);
  torch::optim::SGD saved(small->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD optimizer(large->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  small(at::ones({1, 3})).sum().backward();
  saved.step();
  TrainingCheckpoint(folder / "run.pt").add("optimizer", saved).save();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("optimizer", optimizer);
  EXPECT_ERROR(checkpoint.load(), "state of shape [2, 3] for parameter 0, which is [2, 7]");
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(TrainingCheckpointValues, BringsTheOthersBackWhereOneThrowsWhatIsNoException) {
  struct Thrower {
    void save(torch::serialize::OutputArchive&) const {}
    void load(torch::serialize::InputArchive&) { throw 5; }
  };
  const TemporaryFolder folder;
  int step = 1;
  Thrower thrower;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add("thrower", thrower).save();
  step = 2;
  EXPECT_THROW(checkpoint.load(), int);
  EXPECT_EQ(step, 2);
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
  EXPECT_ERROR(checkpoint.load(), "'module' in ");
  EXPECT_TRUE(at::equal(module.statistics, at::zeros({2})));
}

TEST(TrainingCheckpointValues, LeavesMastersOfSuchAModelAsTheyWere) {
  const TemporaryFolder folder;
  const auto model = std::make_shared<Unloadable>();
  const Tensor weight = model->register_parameter("weight", at::ones({2}));
  torchamp::MasterWeights masters(model, {.dtype = at::kBFloat16});
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("masters", masters).save();
  EXPECT_ERROR(checkpoint.load(), "MasterWeights::load: several elements of 'mask'");
  masters.take_gradients();  // the model has the masters' values
}

TEST(TrainingCheckpointValues, HoldsLongDoublesBeyondAllDoubles) {
  const TemporaryFolder folder;
  using Limits = std::numeric_limits<long double>;
  for (const long double number : {Limits::max(), -Limits::max(), Limits::min(),
                                   Limits::denorm_min(), 1e-310L * (1.L + Limits::epsilon())}) {
    long double from = number, to = 0;
    TrainingCheckpoint(folder / "run.pt").add("number", from).save();
    EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("number", to).load());
    EXPECT_EQ(to, number);
  }
}

TEST(TrainingCheckpointValues, NamesTheObjectWhateverItThrows) {
  const TemporaryFolder folder;
  torch::nn::BatchNorm1d net(2);
  Broken broken;
  int step = 1;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add("net", net).add("broken", broken);
  checkpoint.save();
  const at::NoGradGuard no_grad;
  step = 2;
  net->weight.fill_(3.);
  const Tensor view = net->weight.detach();
  at::manual_seed(4);
  const Tensor next = at::rand({2});
  at::manual_seed(4);
  EXPECT_ERROR(checkpoint.load(),
               "'broken' in '" + (folder / "run.pt").string() + "' does not fit: no such thing");
  EXPECT_EQ(step, 2);
  EXPECT_TRUE(at::equal(view, at::full({2}, 3.)));
  EXPECT_TRUE(view.is_alias_of(net->weight));
  EXPECT_TRUE(at::equal(at::rand({2}), next));
  broken.saves_fail = true;
  EXPECT_ERROR(checkpoint.save(), "TrainingCheckpoint::save: 'broken' cannot be saved: no room");
  EXPECT_ERROR(checkpoint.load(), "does not fit: what is here now could not be kept: no room");
  EXPECT_EQ(step, 2);
}

// ---- Names --------------------------------------------------------------------------------------

TEST(TrainingCheckpointValues, RefusesANameThatCouldNotBeRead) {
  int value = 0;
  TrainingCheckpoint checkpoint("run.pt");
  for (const std::string name : {"\"", "a\"b", "\\", "a\\x41b", "a\\", "\n", "a\nb", "\\u1234"}) {
    EXPECT_ERROR(checkpoint.add(name, value), "TrainingCheckpoint::add: the name '" + name + "'");
    EXPECT_ERROR(checkpoint.add_local(name, value), "a quote, a backslash and the end of a line");
  }
}

TEST(TrainingCheckpointValues, RefusesANameTwiceWhicheverOfTheTwoIsLocal) {
  int value = 0;
  TrainingCheckpoint checkpoint("run.pt");
  checkpoint.add("shared", value).add_local("local", value);
  EXPECT_ERROR(checkpoint.add_local("shared", value), "there is a 'shared' already");
  EXPECT_ERROR(checkpoint.add("local", value), "there is a 'local' already");
}

TEST(TrainingCheckpointValues, ReadsEveryOtherName) {
  const TemporaryFolder folder;
  std::vector<std::string> names{"",   "../b", "é",    "日本",   "__class__",
                                 "%s", "{x}",  "self", "import", "a\xc3"};
  for (int c = 0; c < 256; ++c) {
    if (c != '"' && c != '\\' && c != '\n') names.push_back({'a', static_cast<char>(c), 'b'});
  }
  std::vector<int> values(names.size());
  TrainingCheckpoint checkpoint(folder / "run.pt");
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i % 2 == 0) checkpoint.add(names[i], values[i]);
    if (i % 2 == 1) checkpoint.add_local(names[i], values[i]);
    values[i] = static_cast<int>(i);
  }
  checkpoint.save();
  for (int& value : values) value = -1;
  EXPECT_TRUE(checkpoint.load());
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(values[i], i) << names[i];
}

}  // namespace
