// SPDX-License-Identifier: BSD-3-Clause
// Parts of a TrainingStep with their own headers: masters, files, schedulers, graphs, a log.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#ifdef __linux__
#include <sys/resource.h>
#endif

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/graph_registry.h"
#include "support/linux_only.h"
#include "support/locales.h"
#include "support/temporary_folder.h"
#include "support/training_steps.h"
#include "support/warnings.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/master_weights.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/training_step.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::MasterStorage;
using torchamp::MasterWeights;
using torchamp::MasterWeightsOptions;
using torchamp::TrainingStep;
using training_steps::batch_of;
using training_steps::expect_same_bits;
using training_steps::loss_of;
using training_steps::make_net;
using training_steps::Net;

std::unique_ptr<torch::optim::Optimizer> fused(std::vector<Tensor> parameters) {
  return std::make_unique<torchamp::FusedAdamW>(std::move(parameters),
                                                torch::optim::AdamWOptions(0.02));
}

// ---- Masters ------------------------------------------------------------------------------------

TEST(TrainingStep, TrainsMastersAsTheIterationWrittenByHandBitForBit) {
  struct Case {
    at::ScalarType dtype;
    MasterStorage storage;
    bool main_gradients;
  };
  for (const Case& one : {Case{at::kHalf, MasterStorage::full, false},
                          {at::kBFloat16, MasterStorage::full, true},
                          {at::kBFloat16, MasterStorage::split, false},
                          {at::kBFloat16, MasterStorage::split, true}}) {
    for (const std::int64_t parts : {1, 3}) {
      SCOPED_TRACE(c10::str(one.dtype, ' ', static_cast<int>(one.storage), ' ', one.main_gradients,
                            ' ', parts));
      const MasterWeightsOptions options{
          .dtype = one.dtype, .storage = one.storage, .main_gradients = one.main_gradients};
      const GradScalerOptions scaling{.init_scale = 64.};
      Net by_hand = make_net(at::kCPU), stepped = make_net(at::kCPU);
      MasterWeights masters(by_hand, options);
      const auto optimizer = fused(masters.parameters());
      GradScaler scaler(scaling);
      TrainingStep train(
          stepped, [](auto parameters) { return fused(parameters); },
          {.scaler = scaling, .max_grad_norm = 0.1, .micro_batches = parts, .masters = options});
      for (int window = 0; window < 4; ++window) {
        masters.zero_grad();
        const bool overflows = window == 2;
        for (int part = 0; part < parts; ++part) {
          const auto batch = batch_of(at::kCPU, window * 10 + part, overflows);
          Tensor loss;
          {
            const AutocastGuard autocast(at::kCPU, one.dtype);
            loss = loss_of(by_hand, batch);
          }
          scaler.scale(loss / parts).backward();
          masters.take_gradients();  // each micro-batch is added in fp32
          const auto result = train([&] { return loss_of(stepped, batch); });
          if (result.ended_window()) {
            EXPECT_EQ(result.stepped(), !overflows);
          }
        }
        torchamp::clip_grad_norm_(scaler, *optimizer, 0.1);
        scaler.step(*optimizer);
        scaler.update();
        masters.copy_to_model();
        expect_same_bits(stepped, by_hand);
      }
      const auto left = train.masters().parameters(), right = masters.parameters();
      for (std::size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(at::equal(left[i], right[i]));
    }
  }
}

TEST(TrainingStep, GoesOnWithMastersAfterAnException) {
  Net calm = make_net(at::kCPU), shaken = make_net(at::kCPU);
  const auto options = [] {
    return torchamp::TrainingStepOptions{
        .scaler = GradScalerOptions{.init_scale = 64., .max_skips_in_a_row = 1},
        .masters = MasterWeightsOptions{.dtype = at::kBFloat16}};
  };
  const auto make = [](auto parameters) { return fused(parameters); };
  TrainingStep expected(calm, make, options()), train(shaken, make, options());
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(expected([&] { return loss_of(calm, batch_of(at::kCPU, i)); }));
    EXPECT_ERROR(train([&]() -> Tensor { TORCH_CHECK(false, "no batch"); }), "no batch");
    EXPECT_TRUE(train([&] { return loss_of(shaken, batch_of(at::kCPU, i)); }));
  }
  training_steps::expect_same_weights(shaken, calm);
  EXPECT_ERROR(train([&] { return loss_of(shaken, batch_of(at::kCPU, 0, true)); }),
               "max_skips_in_a_row");
  EXPECT_TRUE(train([&] { return loss_of(shaken, batch_of(at::kCPU, 9)); }));
  EXPECT_TRUE(expected([&] { return loss_of(calm, batch_of(at::kCPU, 9)); }));
  training_steps::expect_same_weights(shaken, calm);
}

TEST(TrainingStep, DropsTheWindowOfMastersIfTheFunctionFailsAfterItsOwnBackward) {
  for (const auto& [storage, main_gradients] : {std::pair(MasterStorage::full, false),
                                                {MasterStorage::full, true},
                                                {MasterStorage::split, false}}) {
    Net calm = make_net(at::kCPU), shaken = make_net(at::kCPU);
    const auto options = [storage = storage, main = main_gradients] {
      return torchamp::TrainingStepOptions{
          .scaler = GradScalerOptions{.init_scale = 64.},
          .micro_batches = 2,
          .masters = MasterWeightsOptions{
              .dtype = at::kBFloat16, .storage = storage, .main_gradients = main}};
    };
    const auto make = [](auto parameters) { return fused(parameters); };
    TrainingStep expected(calm, make, options()), train(shaken, make, options());
    train([&] { return loss_of(shaken, batch_of(at::kCPU, 70)); });
    EXPECT_ERROR(train([&]() -> Tensor {
                   const Tensor part = loss_of(shaken, batch_of(at::kCPU, 71));
                   train.scaler().scale(part).backward();
                   TORCH_CHECK(false, "no second part");
                 }),
                 "no second part");
    EXPECT_EQ(train.pending(), 0);
    for (int i = 0; i < 4; ++i) {
      expected([&] { return loss_of(calm, batch_of(at::kCPU, i)); });
      train([&] { return loss_of(shaken, batch_of(at::kCPU, i)); });
    }
    training_steps::expect_same_weights(shaken, calm);
  }
}

TEST(TrainingStep, HasTheMastersWeightsInTheModelOnceItHasFinished) {
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    Net net = make_net(at::kCPU);
    TrainingStep train(
        net, [](auto parameters) { return fused(parameters); },
        {.micro_batches = 3,
         .masters = MasterWeightsOptions{.dtype = at::kBFloat16, .storage = storage}});
    for (int i = 0; i < 4; ++i) train([&] { return loss_of(net, batch_of(at::kCPU, i)); });
    const Tensor before = net->last->weight.detach().clone();
    EXPECT_TRUE(train.finish()->stepped());
    EXPECT_FALSE(at::equal(net->last->weight, before));
    const auto& masters = train.masters().named_parameters();
    ASSERT_EQ(masters.size(), net->parameters().size());
    for (const auto& [name, master] : masters) {
      const Tensor& weight = net->named_parameters()[name];
      EXPECT_TRUE(at::equal(weight, master.detach().to(weight.scalar_type()))) << name;
    }
  }
}

TEST(TrainingStep, RefusesMastersThatCannotBeBeforeTheModelIsCast) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const MasterWeightsOptions options{.dtype = at::kBFloat16};
  EXPECT_ERROR(TrainingStep(net, sgd, {.masters = options}), "Pass a function that creates it");
  EXPECT_ERROR(TrainingStep(net, fused, {.dtype = at::kHalf, .masters = options}),
               "the masters' dtype is BFloat16");
  EXPECT_EQ(net->first->weight.scalar_type(), at::kFloat);
}

/// Makes one whose construction fails once the masters are there.
using Fail = void (*)(Net& net, const MasterWeightsOptions& masters);
const std::vector<std::pair<std::string, Fail>> failures{
    {"no factory",
     [](Net& net, const MasterWeightsOptions& masters) {
       TrainingStep(net,
                    [](auto) -> std::unique_ptr<torch::optim::Optimizer> {
                      TORCH_CHECK(false, "no factory");
                    },
                    {.masters = masters});
     }},
    {"closure_step.h",
     [](Net& net, const MasterWeightsOptions& masters) {
       TrainingStep(net,
                    [](auto parameters) {
                      return std::make_unique<torch::optim::LBFGS>(std::move(parameters));
                    },
                    {.masters = masters});
     }},
    {"no schedule",
     [](Net& net, const MasterWeightsOptions& masters) {
       TrainingStep(
           net, fused,
           {.micro_batches = 2,
            .masters = masters,
            .scheduler = [](torch::optim::Optimizer&) -> std::unique_ptr<torch::optim::StepLR> {
              TORCH_CHECK(false, "no schedule");
            }});
     }},
    {"LibTorch has no graphs",
     [](Net& net, const MasterWeightsOptions& masters) {
       TrainingStep(net, fused, {.masters = masters, .capture = torchamp::CudaGraphOptions{}});
     }},
    {"cannot write the log", [](Net& net, const MasterWeightsOptions& masters) {
       TrainingStep(net, fused, {.masters = masters, .log = "/no/such/folder/run.csv"});
     }}};

TEST(TrainingStep, LeavesTheModelUnchangedIfItsConstructionFails) {
  for (const auto& [what, fail] : failures) {
    for (const MasterWeightsOptions& masters :
         {MasterWeightsOptions{.dtype = at::kHalf},
          {.dtype = at::kBFloat16, .main_gradients = true},
          {.dtype = at::kBFloat16, .storage = MasterStorage::split},
          {.dtype = at::kBFloat16, .storage = MasterStorage::split, .main_gradients = true}}) {
      SCOPED_TRACE(c10::str(what, ' ', static_cast<int>(masters.storage), masters.main_gradients));
      Net net = make_net(at::kCPU), untouched = make_net(at::kCPU);
      for (Net* one : {&net, &untouched}) loss_of(*one, batch_of(at::kCPU, 7)).backward();
      EXPECT_ERROR(fail(net, masters), what.c_str());
      expect_same_bits(net, untouched);
      const auto parameters = net->parameters(), expected = untouched->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_EQ(parameters[i].scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(parameters[i].grad(), expected[i].grad()));
      }
      torch::optim::SGD optimizer(net->parameters(), 0.1), other(untouched->parameters(), 0.1);
      TrainingStep train(net, optimizer, {.dtype = at::kFloat});
      TrainingStep expects(untouched, other, {.dtype = at::kFloat});
      for (int i = 0; i < 2; ++i) {
        train([&] { return loss_of(net, batch_of(at::kCPU, i)); });
        expects([&] { return loss_of(untouched, batch_of(at::kCPU, i)); });
      }
      expect_same_bits(net, untouched);
    }
  }
}

// ---- Files --------------------------------------------------------------------------------------

TEST(TrainingStep, GoesOnFromAFileAsIfItHadNotBeenStopped) {
  const TemporaryFolder folder;
  for (const bool has_masters : {false, true}) {
    const std::string path = (folder / (has_masters ? "masters.pt" : "plain.pt")).string();
    const auto options = [&] {
      torchamp::TrainingStepOptions some{
          .dtype = at::kBFloat16,
          .scaler = GradScalerOptions{.init_scale = 64., .growth_interval = 3},
          .micro_batches = 2};
      if (has_masters) some.masters = MasterWeightsOptions{.dtype = at::kBFloat16};
      some.scheduler = [](torch::optim::Optimizer& optimizer) {
        return std::make_unique<torch::optim::StepLR>(optimizer, 2, 0.5);
      };
      return some;
    };
    const auto make = [](auto parameters) { return fused(parameters); };
    const auto run = [](TrainingStep& train, Net& net, int from, int to) {
      for (int i = from; i < to; ++i) train([&] { return loss_of(net, batch_of(at::kCPU, i)); });
    };
    Net net = make_net(at::kCPU);
    TrainingStep train(net, make, options());
    EXPECT_FALSE(train.load(path));
    run(train, net, 0, 5);
    EXPECT_ERROR(train.save(path), "1 of 2 micro-batches are pending");
    EXPECT_ERROR((void)train.load(path), "1 of 2 micro-batches are pending");
    run(train, net, 5, 6);
    train.save(path);
    run(train, net, 6, 12);

    Net other = make_net(at::kCPU);
    TrainingStep goes_on(other, make, options());
    ASSERT_TRUE(goes_on.load(path));
    EXPECT_EQ(goes_on.steps(), 3);
    run(goes_on, other, 6, 12);
    expect_same_bits(other, net);
    EXPECT_EQ(goes_on.scaler().state_dict(), train.scaler().state_dict());
    EXPECT_EQ(goes_on.optimizer().param_groups()[0].options().get_lr(),
              train.optimizer().param_groups()[0].options().get_lr());
  }
}

TEST(TrainingStep, RefusesAFileOfWhichOnlyOneSideHasAScheduler) {
  const TemporaryFolder folder;
  const auto path = [&](bool scheduled) {
    return (folder / (scheduled ? "s.pt" : "p.pt")).string();
  };
  const auto options = [](bool scheduled) {
    torchamp::TrainingStepOptions some{.dtype = at::kFloat};
    if (scheduled) {
      some.scheduler = [](torch::optim::Optimizer& optimizer) {
        return std::make_unique<torch::optim::StepLR>(optimizer, 1, 0.5);
      };
    }
    return some;
  };
  for (const bool saved : {false, true}) {
    Net net = make_net(at::kCPU);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    TrainingStep train(net, optimizer, options(saved));
    for (int i = 0; i < 2; ++i) train([&] { return loss_of(net, batch_of(at::kCPU, i)); });
    train.save(path(saved));
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), saved ? 0.05 : 0.1);
    for (const bool loaded : {false, true}) {
      Net other = make_net(at::kCPU);
      torch::optim::SGD fresh(other->parameters(), 0.2);
      TrainingStep goes_on(other, fresh, options(loaded));
      if (loaded == saved) {
        EXPECT_TRUE(goes_on.load(path(saved)));
        expect_same_bits(other, net);
        continue;
      }
      EXPECT_ERROR((void)goes_on.load(path(saved)),
                   saved
                       ? "it was saved with a scheduler, and this TrainingStep has none"
                       : "holds no 'scheduler'. It was saved by a TrainingStep without this part");
      EXPECT_EQ(goes_on.steps(), 0);
      EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.2) << "nothing has changed";
      torchamp::TrainingCheckpoint of_program(path(saved));
      goes_on.add_to(of_program);
      EXPECT_ERROR((void)of_program.load(), "scheduler");
    }
  }
  // If a program has a scheduler outside of the TrainingStep, it adds the scheduler itself.
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.2);
  torch::optim::StepLR beside(optimizer, 1, 0.5);
  TrainingStep train(net, optimizer, options(false));
  torchamp::TrainingCheckpoint of_program(path(true));
  train.add_to(of_program);
  EXPECT_TRUE(of_program.add("scheduler", beside).load());
}

// ---- Schedulers ---------------------------------------------------------------------------------

struct Counting {
  void step() { ++steps; }
  int steps = 0;
};

TEST(TrainingStep, StepsTheSchedulerIfTheStepWasNotSkipped) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Counting counting;
  TrainingStep train(net, optimizer,
                     {.dtype = at::kFloat, .micro_batches = 2, .scheduler = counting});
  for (int i = 0; i < 6; ++i) {
    train([&] { return loss_of(net, batch_of(at::kCPU, i, /*overflows=*/i == 2)); });
  }
  EXPECT_EQ(counting.steps, 2);
  const TemporaryFolder folder;
  EXPECT_ERROR(train.save((folder / "run.pt").string()), "has no save() and load()");
}

// ---- Graphs -------------------------------------------------------------------------------------

TEST(TrainingStep, CapturesIterationsThatGiveWhatEagerOnesDoSimulated) {
  SKIP_WITHOUT(at::kPrivateUse1);
  SKIP_WITHOUT_GRAPH_REGISTRY();
  constexpr double rate = 1. / 128;  // one of fp32, as captured steps take it
  Net eager = make_net(at::kPrivateUse1), captured = make_net(at::kPrivateUse1);
  torchamp::FusedAdamW one(eager->parameters(), torch::optim::AdamWOptions(rate));
  torchamp::FusedAdamW two(captured->parameters(), torch::optim::AdamWOptions(rate));
  const GradScalerOptions scaling{.init_scale = 1024., .growth_interval = 3};
  TrainingStep by_hand(eager, one, {.dtype = at::kHalf, .scaler = scaling, .max_grad_norm = 0.5});
  {
    TrainingStep train(captured, two,
                       {.dtype = at::kHalf,
                        .scaler = scaling,
                        .max_grad_norm = 0.5,
                        .capture = torchamp::CudaGraphOptions{.warmup = 2}});
    EXPECT_ERROR(train([&] { return loss_of(captured, batch_of(simulated::sim0, 0)); }),
                 "a replay runs no host code");
    int calls = 0;
    for (int i = 0; i < 10; ++i) {
      SCOPED_TRACE(i);
      const auto batch = batch_of(simulated::sim0, i, /*overflows=*/i % 4 == 3);
      const auto expected = by_hand([&] { return loss_of(eager, batch); });
      const auto result = train({batch[0], batch[1]}, [&](const auto& inputs) {
        ++calls;
        return loss_of(captured, inputs);
      });
      EXPECT_TRUE(at::equal(result.loss_tensor().cpu(), expected.loss_tensor().cpu()));
      EXPECT_EQ(result.stepped(), i % 4 != 3);
      EXPECT_EQ(result.scale(), expected.scale());
      if (result.stepped()) {
        EXPECT_EQ(result.norm(), expected.norm());
      }
      expect_same_bits(captured, eager);
    }
    EXPECT_EQ(calls, 3) << "replays call nothing";
    EXPECT_EQ(train.steps(), 10);
    simulated::wait_for_device(0);
  }
}

TEST(TrainingStep, CapturesIterationsWithMastersSimulated) {
  SKIP_WITHOUT(at::kPrivateUse1);
  SKIP_WITHOUT_GRAPH_REGISTRY();
  const auto make = [](auto parameters) {  // a rate of fp32, as captured steps take it
    return std::make_unique<torchamp::FusedAdamW>(std::move(parameters),
                                                  torch::optim::AdamWOptions(1. / 128));
  };
  for (const MasterWeightsOptions& masters :
       {MasterWeightsOptions{.dtype = at::kHalf},
        {.dtype = at::kBFloat16, .storage = MasterStorage::split}}) {
    SCOPED_TRACE(static_cast<int>(masters.storage));
    const GradScalerOptions scaling{.init_scale = 1024., .growth_interval = 3};
    Net eager = make_net(at::kPrivateUse1), captured = make_net(at::kPrivateUse1);
    TrainingStep by_hand(eager, make,
                         {.scaler = scaling, .max_grad_norm = 0.5, .masters = masters});
    TrainingStep train(captured, make,
                       {.scaler = scaling,
                        .max_grad_norm = 0.5,
                        .masters = masters,
                        .capture = torchamp::CudaGraphOptions{.warmup = 2}});
    int calls = 0;
    for (int i = 0; i < 8; ++i) {
      SCOPED_TRACE(i);
      const auto batch = batch_of(simulated::sim0, i, /*overflows=*/i % 4 == 3);
      by_hand([&] { return loss_of(eager, batch); });
      const auto result = train({batch[0], batch[1]}, [&](const auto& inputs) {
        ++calls;
        return loss_of(captured, inputs);
      });
      EXPECT_EQ(result.stepped(), i % 4 != 3);
      expect_same_bits(captured, eager);
      const auto left = train.masters().parameters(), right = by_hand.masters().parameters();
      for (std::size_t p = 0; p < left.size(); ++p) {
        EXPECT_TRUE(at::equal(left[p].cpu(), right[p].cpu()));
      }
    }
    EXPECT_EQ(calls, 3) << "replays call nothing";
    simulated::wait_for_device(0);
  }
}

TEST(TrainingStep, CapturesAgainAfterTrainAndEvalOfTheModelOrAPartOfItSimulated) {
  SKIP_WITHOUT(at::kPrivateUse1);
  SKIP_WITHOUT_GRAPH_REGISTRY();
  constexpr double rate = 1. / 128;
  Net eager = make_net(at::kPrivateUse1), captured = make_net(at::kPrivateUse1);
  torchamp::FusedAdamW one(eager->parameters(), torch::optim::AdamWOptions(rate));
  torchamp::FusedAdamW two(captured->parameters(), torch::optim::AdamWOptions(rate));
  TrainingStep by_hand(eager, one, {.dtype = at::kHalf});
  TrainingStep train(captured, two,
                     {.dtype = at::kHalf, .capture = torchamp::CudaGraphOptions{.warmup = 2}});
  int calls = 0;
  for (int i = 0; i < 18; ++i) {
    SCOPED_TRACE(i);
    for (Net* net : {&eager, &captured}) {
      if (i == 5) (*net)->norm->eval();
      if (i == 10) (*net)->train();
      if (i == 14) (*net)->train(), (*net)->norm->train();  // as they are
    }
    const auto batch = batch_of(simulated::sim0, i);
    if (i == 7) train.evaluate([&] { return loss_of(captured, batch); });
    by_hand([&] { return loss_of(eager, batch); });
    train({batch[0], batch[1]}, [&](const auto& inputs) {
      ++calls;
      return loss_of(captured, inputs);
    });
    expect_same_bits(captured, eager);
  }
  EXPECT_EQ(calls, 3 + 2 + 2) << "one eager iteration and one capture for each new mode";
  simulated::wait_for_device(0);
}

/// Whose steps have no overflow flag and no scale.
void expect_results_of_a_disabled_scaler(at::DeviceType device, bool captures) {
  SCOPED_TRACE(c10::str("captures: ", captures));
  Net net = make_net(device);
  torchamp::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
  TrainingStep train(
      net, optimizer,
      {.dtype = at::kFloat,
       .scaler = GradScalerOptions{.enabled = false},
       .capture = torchamp::CudaGraphOptions{.warmup = 2, .enabled = captures},
       .scheduler = [](auto& o) { return std::make_unique<torch::optim::StepLR>(o, 1, 0.5); }});
  for (int i = 0; i < 5; ++i) {
    const auto result =
        train(batch_of(device, i), [&](const auto& inputs) { return loss_of(net, inputs); });
    EXPECT_TRUE(result.ended_window());
    EXPECT_TRUE(result.stepped());
    EXPECT_EQ(result.scale(), 1.);
    EXPECT_FALSE(result.found_inf().defined());
  }
  EXPECT_EQ(train.steps(), 5);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1. / 32);  // the first step() leaves it
}

TEST(TrainingStep, CountsStepsOfADisabledScalerThatMayBeCaptured) {
  expect_results_of_a_disabled_scaler(at::kCPU, /*captures=*/false);
}

TEST(TrainingStep, CountsCapturedStepsOfADisabledScalerSimulated) {
  SKIP_WITHOUT(at::kPrivateUse1);
  SKIP_WITHOUT_GRAPH_REGISTRY();
  expect_results_of_a_disabled_scaler(at::kPrivateUse1, /*captures=*/true);
  simulated::wait_for_device(0);
}

TEST(TrainingStep, RefusesAtConstructionWhatNoGraphCanHold) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torchamp::FusedSGD fused_sgd(net->parameters(), torch::optim::SGDOptions(0.1));
  const torchamp::CudaGraphOptions options;
  EXPECT_ERROR(TrainingStep(net, sgd, {.dtype = at::kFloat, .capture = options}),
               "an ordinary optimizer");
  EXPECT_ERROR(TrainingStep(net, fused_sgd, {.dtype = at::kFloat, .capture = options}),
               "LibTorch has no graphs");
  TrainingStep eager(
      net, fused_sgd,
      {.dtype = at::kFloat, .capture = torchamp::CudaGraphOptions{.enabled = false}});
  EXPECT_TRUE(
      eager(batch_of(at::kCPU, 0), [&](const auto& inputs) { return loss_of(net, inputs); }));
}

// ---- A log --------------------------------------------------------------------------------------

class LogOnDevice : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(TrainingStep, LogOnDevice, all_devices(), device_name);

TEST_P(LogOnDevice, HasALineForEachStepAndWaitsForNone) {
  const TemporaryFolder folder;
  const std::string path = (folder / "run.csv").string();
  Net net = make_net(GetParam());
  torchamp::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  std::ostringstream expected;
  expected.precision(9);
  std::vector<torchamp::TrainingResult> results;
  {
    TrainingStep train(net, optimizer,
                       {.dtype = at::kHalf,
                        .scaler = GradScalerOptions{.init_scale = 64.},
                        .max_grad_norm = 1.,
                        .log = path});
    for (int i = 0; i < 5; ++i) {
      const auto batch = batch_of(GetParam(), i, /*overflows=*/i == 2);
      const simulated::Counts counts;
      results.push_back(train([&] { return loss_of(net, batch); }));
      if (i > 0) {
        EXPECT_EQ(counts.now().waits, 0) << i;
      }
    }
    train.finish();
  }
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, "step,loss,scale,skipped,norm,time");
  for (std::size_t i = 0; i < results.size(); ++i) {
    std::ostringstream begins;
    begins.precision(9);
    begins << i + 1 << ',' << results[i].loss_tensor().item<float>() << ',' << (i < 3 ? 64 : 32)
           << ',' << (i == 2 ? 1 : 0) << ',' << results[i].norm_tensor().item<float>() << ',';
    std::getline(file, line);
    EXPECT_THAT(line, testing::StartsWith(begins.str()));
  }
  EXPECT_FALSE(std::getline(file, line));
}

TEST(TrainingStep, WritesALogThatCanBeReadWhileItTrains) {
  const TemporaryFolder folder;
  const std::string path = (folder / "run.csv").string();
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, {.dtype = at::kFloat, .log = path});
  for (int steps = 1; steps < 3; ++steps) {
    train([&] { return loss_of(net, batch_of(at::kCPU, steps)); });
    std::ifstream file(path);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(std::ranges::count(text, '\n'), 1 + steps) << text;
  }
}

TEST(TrainingStep, WritesALogWithTheSameNumbersInEveryLocale) {
  const TemporaryFolder folder;
  const std::string path = (folder / "run.csv").string();
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  {
    const GroupingStreams grouping;
    TrainingStep train(
        net, optimizer,
        {.dtype = at::kFloat, .scaler = GradScalerOptions{.init_scale = 2048.5}, .log = path});
    train([&] { return loss_of(net, batch_of(at::kCPU, 1)); });
  }
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(text, testing::HasSubstr(",2048.5,0,,"));
}

TEST(TrainingStep, WithALogHasNoScaleOfAWindowThatFailed) {
  const TemporaryFolder folder;
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer,
                     {.dtype = at::kFloat,
                      .scaler = GradScalerOptions{.init_scale = 8., .max_skips_in_a_row = 1},
                      .micro_batches = 2,
                      .log = (folder / "run.csv").string()});
  const auto part = [&](bool bad) {
    return train([&] { return loss_of(net, batch_of(at::kCPU, 0, bad)); });
  };
  part(true);
  EXPECT_ERROR(part(true), "max_skips_in_a_row");
  EXPECT_FALSE(part(false).scale_tensor().defined());
  EXPECT_EQ(part(false).scale_tensor().item<float>(), 8.F);
}

/// The lines of a file.
std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

TEST(TrainingStep, LogsALossInFp64WithAllItsDigits) {
  const TemporaryFolder folder;
  const std::string path = (folder / "run.csv").string();
  const at::Tensor weight = torch::ones({1}, at::kDouble).requires_grad_();
  torch::nn::Module net;
  net.register_parameter("weight", weight);
  torch::optim::SGD optimizer(net.parameters(), 0.);
  TrainingStep train(net, optimizer, {.dtype = at::kFloat, .log = path});
  train([&] { return (net.parameters()[0] * 1e300).sum(); });
  train([&] { return (net.parameters()[0] / 3.).sum(); });
  EXPECT_THAT(lines_of(path)[1], testing::StartsWith("1,1.0000000000000001e+300,1,"));
  EXPECT_THAT(lines_of(path)[2], testing::StartsWith("2,0.33333333333333331,1,"));
}

TEST(TrainingStep, LogsStepsWithoutAGradientAsSkipped) {
  const TemporaryFolder folder;
  const std::string path = (folder / "run.csv").string();
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const at::Tensor other = torch::ones({1}).requires_grad_();
  TrainingStep train(net, optimizer, {.dtype = at::kFloat, .log = path});
  const CollectedWarnings warnings;
  EXPECT_FALSE(train([&] { return other.sum(); }).stepped());
  EXPECT_THAT(lines_of(path)[1], testing::StartsWith("1,1,1,1,,"));
}

TEST(TrainingStep, EndsACutOffLineOfAnEarlierLog) {
  const TemporaryFolder folder;
  const std::string path = (folder / "run.csv").string();
  std::ofstream(path) << "step,loss,scale,skipped,norm,time\n1,0.5,1";
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, {.dtype = at::kFloat, .log = path});
  train([&] { return loss_of(net, batch_of(at::kCPU, 1)); });
  const auto lines = lines_of(path);
  ASSERT_EQ(lines.size(), 3);
  EXPECT_EQ(lines[1], "1,0.5,1");
  EXPECT_THAT(lines[2], testing::StartsWith("1,"));
}

#ifdef __linux__

/// While it lives, no file may grow beyond this number of bytes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::uintmax_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, SIG_DFL);
  }

 private:
  rlimit before_{};
};

TEST(TrainingStep, TrainsOnWhileTheDiskOfItsLogIsFullAndThenWritesTheMissingLines) {
  const TemporaryFolder folder;
  const std::string path = (folder / "run.csv").string();
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, {.dtype = at::kFloat, .micro_batches = 2, .log = path});
  const auto step = [&](int i) {
    return train([&] { return loss_of(net, batch_of(at::kCPU, i)); });
  };
  step(0);
  step(0);
  const auto written = lines_of(path);
  {
    const CollectedWarnings warnings;
    const FileSizeLimit full(std::filesystem::file_size(path) + 5);
    for (int i = 1; i < 4; ++i) step(i);
    ASSERT_TRUE(step(4).stepped());
    step(5);
    const auto result = train.finish();
    ASSERT_TRUE(result);
    EXPECT_TRUE(result->stepped());
    EXPECT_EQ(lines_of(path), written) << "no part of a line";
    EXPECT_THAT(warnings.text(), testing::HasSubstr("cannot write the log"));
    EXPECT_EQ(warnings.text().find("cannot write"), warnings.text().rfind("cannot write"));
  }
  step(6);
  step(7);
  const auto lines = lines_of(path);
  ASSERT_EQ(lines.size(), 6);
  for (std::size_t i = 1; i < lines.size(); ++i) {
    EXPECT_THAT(lines[i], testing::StartsWith(std::to_string(i) + ','));
  }
}

#else
TEST(TrainingStep, LogsOnAFullDisk) {
  SKIP_WITHOUT_LINUX();
}
#endif

TEST(TrainingStep, SaysThatTheLogCannotBeWritten) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  EXPECT_ERROR(
      TrainingStep(net, optimizer, {.dtype = at::kFloat, .log = "/no/such/folder/run.csv"}),
      "cannot write the log");
}

}  // namespace
