// SPDX-License-Identifier: BSD-3-Clause
// TrainingSteps with several optimizers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/graph_registry.h"
#include "support/temporary_folder.h"
#include "support/training_steps.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/lr_scheduler.h"
#include "torchamp/master_weights.h"
#include "torchamp/split_for_muon.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/training_step.h"

namespace {

using at::Tensor;
using torch::optim::Optimizer;
using torchamp::FusedAdam;
using torchamp::FusedAdamW;
using torchamp::FusedMuon;
using torchamp::GradScalerOptions;
using torchamp::MasterStorage;
using torchamp::MasterWeightsOptions;
using torchamp::TrainingStep;
using torchamp::TrainingStepOptions;
using training_steps::batch_of;
using training_steps::expect_same_bits;
using training_steps::loss_of;
using training_steps::make_net;
using training_steps::Net;
using Pointers = std::vector<std::shared_ptr<Optimizer>>;

/// An optimizer for each of the net's six parameters.
template <class Adam>
Pointers six(const std::vector<Tensor>& parameters) {
  Pointers all;
  for (const Tensor& parameter : parameters) {
    all.push_back(
        std::make_shared<Adam>(std::vector<Tensor>{parameter}, torch::optim::AdamOptions(0.02)));
  }
  return all;
}

TrainingStep::Optimizers refs(const Pointers& pointers) {
  TrainingStep::Optimizers all;
  for (const auto& one : pointers) all.emplace_back(*one);
  return all;
}

TrainingStepOptions options_of(std::int64_t micro_batches = 1) {
  return {.dtype = at::kFloat,
          .scaler = GradScalerOptions{.init_scale = 64.},
          .max_grad_norm = 0.1,
          .micro_batches = micro_batches};
}

/// Trains both nets with the same batches, of which the third window has one that overflows, and
/// expects the same.
void expect_trains_alike(TrainingStep& train, Net net, TrainingStep& expected, Net other,
                         std::int64_t micro_batches) {
  for (int i = 0; i < 5 * static_cast<int>(micro_batches); ++i) {
    const auto batch = batch_of(at::kCPU, i, i == 2 * micro_batches);
    const auto of_one = expected([&] { return loss_of(other, batch); });
    const auto of_several = train([&] { return loss_of(net, batch); });
    EXPECT_EQ(of_several.stepped(), of_one.stepped());
    expect_same_bits(net, other);
  }
  EXPECT_EQ(train.scaler().get_scale(), expected.scaler().get_scale());
  EXPECT_EQ(train.steps(), 5);
}

template <class Adam>
void expect_six_train_as_one() {
  for (const std::int64_t micro_batches : {1, 3}) {
    SCOPED_TRACE(micro_batches);
    Net net = make_net(at::kCPU), other = make_net(at::kCPU);
    Adam one(other->parameters(), torch::optim::AdamOptions(0.02));
    const Pointers all = six<Adam>(net->parameters());
    ASSERT_EQ(all.size(), 6U);
    TrainingStep train(net, refs(all), options_of(micro_batches));
    TrainingStep expected(other, one, options_of(micro_batches));
    expect_trains_alike(train, net, expected, other, micro_batches);
  }
}

TEST(SeveralOptimizers, TrainAsOneWithAllParametersBitForBit) {
  expect_six_train_as_one<FusedAdam>();
  expect_six_train_as_one<torch::optim::Adam>();
}

TEST(SeveralOptimizers, TrainMastersAsOneBitForBit) {
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    for (const std::int64_t micro_batches : {1, 3}) {
      Net net = make_net(at::kCPU), other = make_net(at::kCPU);
      TrainingStepOptions options = options_of(micro_batches);
      options.dtype.reset();
      options.masters = MasterWeightsOptions{.dtype = at::kBFloat16, .storage = storage};
      TrainingStep train(
          net, [](std::vector<Tensor> parameters) { return six<FusedAdam>(parameters); }, options);
      TrainingStep expected(
          other,
          [](std::vector<Tensor> parameters) {
            return std::make_unique<FusedAdam>(parameters, torch::optim::AdamOptions(0.02));
          },
          options);
      expect_trains_alike(train, net, expected, other, micro_batches);
    }
  }
}

TEST(SeveralOptimizers, AllSkipIfAGradientOfOneIsNotFinite) {
  for (const bool is_fused : {true, false}) {
    Net net = make_net(at::kCPU);
    const auto parameters = net->parameters();
    std::vector<Tensor> rest(parameters.begin() + 1, parameters.end());
    FusedAdam first({parameters[0]}, torch::optim::AdamOptions(0.02));
    const std::unique_ptr<Optimizer> second =
        is_fused ? std::unique_ptr<Optimizer>(std::make_unique<FusedMuon>(
                       std::vector<Tensor>{net->last->weight}, torchamp::MuonOptions(0.02)))
                 : std::make_unique<torch::optim::SGD>(rest, torch::optim::SGDOptions(0.02));
    TrainingStep train(net, {first, *second}, options_of());
    const auto before = net->last->weight.detach().clone();
    const auto bad = train([&] {
      return loss_of(net, batch_of(at::kCPU, 1)) +
             parameters[0].sum() * std::numeric_limits<float>::infinity();
    });
    EXPECT_FALSE(bad.stepped());
    EXPECT_TRUE(at::equal(net->last->weight, before));
    EXPECT_EQ(train.scaler().get_scale(), 32.);
    EXPECT_TRUE(train([&] { return loss_of(net, batch_of(at::kCPU, 2)); }).stepped());
    EXPECT_FALSE(at::equal(net->last->weight, before));
  }
}

TEST(SeveralOptimizers, ClipTheNormOfAllGradients) {
  Net net = make_net(at::kCPU);
  const Pointers all = six<FusedAdam>(net->parameters());
  TrainingStep train(net, refs(all), options_of());
  const auto result = train([&] { return loss_of(net, batch_of(at::kCPU, 1)); });
  Net other = make_net(at::kCPU);
  loss_of(other, batch_of(at::kCPU, 1)).backward();
  double squares = 0.;
  for (const Tensor& parameter : other->parameters()) {
    squares += parameter.grad().square().sum().item<double>();
  }
  EXPECT_NEAR(result.norm(), std::sqrt(squares), 1e-4);
}

/// Muon and AdamW for one net, with a schedule of each.
struct Split {
  explicit Split(at::Device device, TrainingStepOptions options = options_of())
      : net(make_net(device)) {
    options.scheduler = {muon_rates, adamw_rates};
    train = std::make_unique<TrainingStep>(net, TrainingStep::Optimizers{muon, adamw}, options);
  }
  Net net;
  torchamp::MuonSplit split = torchamp::split_for_muon(net, {.heads = {"last"}});
  FusedMuon muon{split.matrices, torchamp::MuonOptions(1. / 16)};
  FusedAdamW adamw{split.others, torch::optim::AdamWOptions(1. / 32)};
  torchamp::WarmupCosine muon_rates{muon, {.warmup_steps = 4, .total_steps = 8}};
  torchamp::WarmupLinear adamw_rates{adamw, {.warmup_steps = 2, .total_steps = 10}};  // fp32 ones
  std::unique_ptr<TrainingStep> train;
};

TEST(SeveralOptimizers, AdvanceTheScheduleOfEachAfterAStepThatWasTaken) {
  Split split(at::kCPU);
  const auto step = [&](bool overflows) {
    (*split.train)([&] { return loss_of(split.net, batch_of(at::kCPU, 1, overflows)); });
  };
  const auto rate = [](const Optimizer& optimizer) {
    return optimizer.param_groups()[0].options().get_lr();
  };
  step(false);
  EXPECT_EQ(rate(split.muon), 0.25 / 16);
  EXPECT_EQ(rate(split.adamw), 0.5 / 32);
  step(true);
  EXPECT_EQ(rate(split.muon), 0.25 / 16);
  EXPECT_EQ(rate(split.adamw), 0.5 / 32);
  step(false);
  EXPECT_EQ(rate(split.muon), 0.5 / 16);
  EXPECT_EQ(rate(split.adamw), 1. / 32);
}

TEST(SeveralOptimizers, MakeASchedulerForEachByAFunction) {
  Net net = make_net(at::kCPU);
  const Pointers all = six<FusedAdam>(net->parameters());
  TrainingStepOptions options = options_of();
  options.scheduler = [](Optimizer& optimizer) {
    return std::make_shared<torch::optim::StepLR>(optimizer, 1, 0.5);
  };
  TrainingStep train(net, refs(all), options);
  for (int i = 0; i < 2; ++i) train([&] { return loss_of(net, batch_of(at::kCPU, i)); });
  for (const auto& one : all) EXPECT_EQ(one->param_groups()[0].options().get_lr(), 0.01);
}

TEST(SeveralOptimizers, GoOnFromAFileBitForBit) {
  const TemporaryFolder folder;
  const std::string path = (folder / "several.pt").string();
  Split split(at::kCPU), resumed(at::kCPU);
  const auto step = [](Split& one, int i) {
    (*one.train)([&] { return loss_of(one.net, batch_of(at::kCPU, i)); });
  };
  for (int i = 0; i < 3; ++i) step(split, i);
  split.train->save(path);
  ASSERT_TRUE(resumed.train->load(path));
  for (int i = 3; i < 9; ++i) {
    step(split, i);
    step(resumed, i);
    expect_same_bits(resumed.net, split.net);
  }
}

TEST(SeveralOptimizers, CaptureIterationsThatGiveWhatEagerOnesDoWithRatesThatChangeSimulated) {
  SKIP_WITHOUT(at::kPrivateUse1);
  SKIP_WITHOUT_GRAPH_REGISTRY();
  TrainingStepOptions options = options_of();
  Split eager(simulated::sim0, options);
  options.capture = torchamp::CudaGraphOptions{};
  Split captured(simulated::sim0, options);
  int calls = 0;
  for (int i = 0; i < 12; ++i) {
    const auto batch = batch_of(simulated::sim0, i, i == 6);
    const auto expected = (*eager.train)([&] { return loss_of(eager.net, batch); });
    const auto actual = (*captured.train)(batch, [&](const std::vector<Tensor>& inputs) {
      ++calls;
      return loss_of(captured.net, inputs);
    });
    EXPECT_EQ(actual.stepped(), expected.stepped());
    expect_same_bits(captured.net, eager.net);
  }
  EXPECT_LE(calls, 5);
  simulated::wait_for_device(0);
}

TEST(SeveralOptimizers, StepWhatIsAddedToOneLater) {
  Net net = make_net(at::kCPU);
  const auto parameters = net->parameters();
  FusedAdam first({parameters[0]}, torch::optim::AdamOptions(0.02));
  FusedAdam second({parameters[1]}, torch::optim::AdamOptions(0.02));
  TrainingStep train(net, {first, second}, options_of());
  train([&] { return loss_of(net, batch_of(at::kCPU, 1)); });
  second.add_param_group(torch::optim::OptimizerParamGroup({parameters[2]}));
  const Tensor before = parameters[2].detach().clone();
  train([&] { return loss_of(net, batch_of(at::kCPU, 2)); });
  EXPECT_FALSE(at::equal(parameters[2], before));
}

TEST(SeveralOptimizers, UnscaleWhatIsAddedToOneLater) {
  Net net = make_net(at::kCPU);
  const auto parameters = net->parameters();
  torch::optim::SGD first({parameters[0]}, 0.01), second({parameters[1]}, 0.01);
  TrainingStep train(net, {first, second},
                     {.dtype = at::kFloat, .scaler = GradScalerOptions{.init_scale = 1024.}});
  const auto loss = [&] { return loss_of(net, batch_of(at::kCPU, 1)); };
  train(loss);
  second.add_param_group(torch::optim::OptimizerParamGroup({parameters[2]}));
  const Tensor gradient = torch::autograd::grad({loss()}, {parameters[2]})[0];
  const Tensor expected = parameters[2].detach() - 0.01 * gradient;
  train(loss);
  EXPECT_TRUE(at::allclose(parameters[2], expected, 1e-4, 1e-6));
}

TEST(SeveralOptimizers, AreNamedAsTheOptimizersOfATrainingStepInErrors) {
  for (const bool is_fused : {true, false}) {
    Net net = make_net(at::kCPU);
    const Pointers all =
        is_fused ? six<FusedAdam>(net->parameters()) : six<torch::optim::Adam>(net->parameters());
    const Pointers others =
        is_fused ? six<FusedAdam>(net->parameters()) : six<torch::optim::Adam>(net->parameters());
    torchamp::GradScaler scaler({.init_scale = 64.});
    TrainingStep train(net, refs(all), {.dtype = at::kFloat, .scaler = scaler});
    const auto batch = batch_of(at::kCPU, 0);
    const auto unscales = [&] {
      scaler.scale(loss_of(net, batch)).backward();
      scaler.unscale_(*others.front());
      return loss_of(net, batch);
    };
    EXPECT_ERROR(train(unscales),
                 std::string("of this optimizer, the optimizers of a TrainingStep, holds a part "
                             "that was unscaled for another optimizer, ") +
                     (is_fused ? "FusedAdam, " : "torch::optim::Adam, "));
  }
}

TEST(SeveralOptimizers, AreNumberedAndMustNotShareParameters) {
  Net net = make_net(at::kCPU);
  const auto parameters = net->parameters();
  FusedAdam first({parameters[0], parameters[1]}), second({parameters[1]});
  EXPECT_ERROR(TrainingStep(net, {first, second}),
               "a parameter of shape [8] is in the optimizers 0 and 1");
  EXPECT_ERROR(TrainingStep(net, TrainingStep::Optimizers()), "there is no optimizer");
  FusedAdam third({parameters[2]});
  TrainingStep train(net, {first, third});
  EXPECT_EQ(&train.optimizer(), &first);
  EXPECT_EQ(&train.optimizer(1), &third);
  EXPECT_ERROR(train.optimizer(2), "TrainingStep::optimizer: the number is 2, and there are 2");
}

}  // namespace
