// SPDX-License-Identifier: BSD-3-Clause
// Optimizers in a TrainingCheckpoint: how they go on, and which do not fit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using torchamp::TrainingCheckpoint;

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
  EXPECT_TRUE(
      TrainingCheckpoint(folder / "run.pt").add("net", second).add("optimizer", other).load());
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
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("optimizer", optimizer).load());
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
  EXPECT_ERROR((void)checkpoint.load(),
               does_not_fit +
                   "it holds the state of an Adam or AdamW, and the program's optimizer "
                   "is an SGD. Create the optimizer of the run that saved it, or do not "
                   "add this optimizer: it then starts without state.");
  EXPECT_EQ(sgd.state().size(), 1U);
  TrainingCheckpoint(folder / "run.pt").add("optimizer", sgd).save();
  torchamp::FusedAdamW fused({w}, torch::optim::AdamWOptions(0.25));
  fused.step();
  TrainingCheckpoint of_fused(folder / "run.pt");
  of_fused.add("optimizer", fused);
  EXPECT_ERROR((void)of_fused.load(), does_not_fit +
                                          "it holds the state of an SGD, and the program's "
                                          "optimizer is an Adam or AdamW. Create");
  EXPECT_EQ(fused.state().size(), 1U);
  EXPECT_EQ(fused.param_groups()[0].options().get_lr(), 0.25);
}

TEST(TrainingCheckpointValues, RestoresTheOptionsOfEachGroupOfAMuon) {
  const TemporaryFolder folder;
  const Tensor first = at::ones({2, 3}).requires_grad_(),
               second = at::ones({3, 3}).requires_grad_();
  using torchamp::MuonOptions;
  const auto muon_of = [&](double lr, const MuonOptions& of_second) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>{first});
    groups.emplace_back(std::vector<Tensor>{second}, std::make_unique<MuonOptions>(of_second));
    return torchamp::FusedMuon(groups, MuonOptions(lr));
  };
  const MuonOptions own =
      MuonOptions(0.5).momentum(0.25).adjust_lr(MuonOptions::AdjustLr::match_rms_adamw);
  torchamp::FusedMuon saved = muon_of(0.125, own), loaded = muon_of(1., MuonOptions());
  TrainingCheckpoint(folder / "run.pt").add("optimizer", saved).save();
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("optimizer", loaded).load());
  const auto options = [&](std::size_t group) {
    return static_cast<const MuonOptions&>(loaded.param_groups()[group].options());
  };
  EXPECT_EQ(options(0), MuonOptions(0.125));
  EXPECT_EQ(options(1), own);

  torch::optim::SGD sgd({first}, torch::optim::SGDOptions(0.1).nesterov(true).momentum(0.5));
  EXPECT_ERROR((void)TrainingCheckpoint(folder / "run.pt").add("optimizer", sgd).load(),
               "it holds the state of a FusedMuon, and the program's optimizer is an SGD.");
}

TEST(TrainingCheckpointValues, RefusesAnOptimizerOfWhichTheFileHasMoreParameters) {
  const TemporaryFolder folder;
  torch::nn::Linear two(3, 3), one(torch::nn::LinearOptions(3, 3).bias(false));
  torch::optim::SGD saved(two->parameters(), 0.1), optimizer(one->parameters(), 0.1);
  TrainingCheckpoint(folder / "run.pt").add("optimizer", saved).save();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("optimizer", optimizer);
  EXPECT_ERROR((void)checkpoint.load(),
               "TrainingCheckpoint::load: 'optimizer' in '" + (folder / "run.pt").string() +
                   "' does not fit: it has parameter groups of [2] parameters, and the program's "
                   "optimizer [1]. Create model and optimizer as in the run that saved it, or do "
                   "not add this optimizer: it then starts without state.");
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
  EXPECT_ERROR((void)checkpoint.load(), "state of shape [2, 3] for parameter 0, which is [2, 7]");
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(TrainingCheckpointValues, CastsAnOptimizersStateToItsParametersDtype) {
  const TemporaryFolder folder;
  const Tensor x = at::ones({1, 3});
  torch::nn::Linear narrow(3, 2), wide(3, 2);
  narrow->to(at::kBFloat16);
  torch::optim::AdamW saved(narrow->parameters());
  narrow->forward(x.to(at::kBFloat16)).sum().backward();
  saved.step();
  TrainingCheckpoint(folder / "run.pt").add("net", narrow).add("optimizer", saved).save();

  torchamp::MasterWeights masters(wide, {.dtype = at::kBFloat16});
  torch::optim::AdamW optimizer(masters.parameters());
  EXPECT_TRUE(
      TrainingCheckpoint(folder / "run.pt").add("net", masters).add("optimizer", optimizer).load());
  const auto moment = [](torch::optim::AdamW& of, const Tensor& parameter) {
    auto& state = *of.state().at(parameter.unsafeGetTensorImpl());
    return static_cast<torch::optim::AdamWParamState&>(state).exp_avg();
  };
  const Tensor before = moment(saved, narrow->weight);
  const Tensor after = moment(optimizer, masters.parameters()[0]);
  EXPECT_EQ(before.scalar_type(), at::kBFloat16);
  EXPECT_EQ(after.scalar_type(), at::kFloat) << "moments of 16 bits lose small gradients";
  EXPECT_TRUE(at::equal(after, before.to(at::kFloat)));
}

// The weight itself is in bf16, which cannot hold 257.
TEST(TrainingCheckpointValues, KeepsTheStateOfASplitWeightInFp32) {
  const TemporaryFolder folder;
  torch::nn::Linear net(3, 2);
  torchamp::MasterWeights masters(
      net, {.dtype = at::kBFloat16, .storage = torchamp::MasterStorage::split});
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const Tensor& p : masters.parameters()) {
    p.mutable_grad() = at::full(p.sizes(), 257., at::kFloat);
  }
  optimizer.step();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("masters", masters).add("optimizer", optimizer).save();
  EXPECT_TRUE(checkpoint.load());
  for (const Tensor& p : masters.parameters()) {
    auto& state =
        static_cast<torch::optim::SGDParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
    EXPECT_TRUE(at::equal(state.momentum_buffer(), at::full(p.sizes(), 257., at::kFloat)));
  }
}

TEST(TrainingCheckpointValues, RefusesAnLbfgsOfParametersOfOtherSizes) {
  const TemporaryFolder folder;
  torch::nn::Linear small(3, 2), large(5, 2);
  torch::optim::LBFGS saved(small->parameters()), other(large->parameters());
  const auto step = [](torch::nn::Linear& net, torch::optim::LBFGS& optimizer, int64_t width) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const Tensor loss = net->forward(at::ones({1, width})).pow(2).sum();
      loss.backward();
      return loss;
    });
  };
  step(small, saved, 3);
  TrainingCheckpoint(folder / "run.pt").add("optimizer", saved).save();
  EXPECT_ERROR((void)TrainingCheckpoint(folder / "run.pt").add("optimizer", other).load(),
               "it holds state of 8 elements, and the parameters have 12 in the program");
  step(large, other, 5);
}

}  // namespace
