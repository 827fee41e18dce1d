// SPDX-License-Identifier: BSD-3-Clause
// TrainingSteps of several processes.
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "support/temporary_folder.h"
#include "support/training_steps.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/distributed/training_group.h"
#include "torchamp/master_weights.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/training_step.h"

namespace {

using at::Tensor;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::TrainingStep;
using training_steps::batch_of;
using training_steps::expect_same_bits;
using training_steps::expect_same_weights;
using training_steps::make_net;
using training_steps::Net;

Tensor loss_of(const Tensor& output, const std::vector<Tensor>& batch) {
  return (output - batch[1]).pow(2).mean();
}

TEST(TrainingGroup, AveragesAsDistributedDataParallelBitForBit) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const std::int64_t parts : {1, 3}) {
    SCOPED_TRACE(parts);
    const GradScalerOptions scaling{.init_scale = 64.};
    Net by_hand = make_net(at::kCPU), stepped = make_net(at::kCPU);
    torchamp::DistributedDataParallel net(by_hand, group);
    torchamp::FusedAdamW optimizer(by_hand->parameters(), torch::optim::AdamWOptions(0.02));
    torchamp::FusedAdamW other(stepped->parameters(), torch::optim::AdamWOptions(0.02));
    GradScaler scaler(scaling);
    TrainingStep train(stepped, other,
                       {.dtype = at::kFloat,
                        .scaler = scaling,
                        .max_grad_norm = 0.1,
                        .micro_batches = parts,
                        .group = group});
    for (int window = 0; window < 4; ++window) {
      optimizer.zero_grad();
      for (int part = 0; part < parts; ++part) {
        const auto batch = batch_of(at::kCPU, 1000 * group->getRank() + 10 * window + part);
        {
          const auto no_sync = net.no_sync(part + 1 < parts);
          const Tensor loss = loss_of(net.forward(batch[0]), batch);
          scaler.scale(loss / parts).backward();
        }
        train([&] { return loss_of(stepped->forward(batch[0]), batch); });
      }
      torchamp::clip_grad_norm_(scaler, optimizer, 0.1);
      scaler.step(optimizer);
      scaler.update();
      expect_same_bits(stepped, by_hand);
    }
    expect_same_everywhere(group, stepped->parameters());
    if (parts == 1) continue;
    const auto last = batch_of(at::kCPU, group->getRank());  // a window that ends early
    train([&] { return loss_of(stepped->forward(last[0]), last); });
    EXPECT_TRUE(train.finish()->stepped());
    expect_same_everywhere(group, stepped->parameters());
  }
}

TEST(TrainingGroup, GoesOnAfterABackwardInTheFunction) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  Net net = make_net(at::kCPU);
  torchamp::FusedAdamW optimizer(net->parameters());
  TrainingStep train(
      net, optimizer,
      {.dtype = at::kFloat, .scaler = GradScalerOptions{.init_scale = 64.}, .group = group});
  const auto batch = batch_of(at::kCPU, group->getRank());
  const auto loss = [&] { return loss_of(net->forward(batch[0]), batch); };
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(train([&] {
                   Tensor both = loss();
                   both.backward({}, /*retain_graph=*/true);
                   return both;
                 }),
                 "has called backward() without scale");
    EXPECT_TRUE(train(loss));
    expect_same_everywhere(group, net->parameters());
  }
}

TEST(TrainingGroup, DropsTheWindowOfShardedMastersIfTheFunctionFailsAfterItsOwnBackward) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const auto options = [&] {
    return torchamp::TrainingStepOptions{
        .scaler = GradScalerOptions{.init_scale = 64.},
        .micro_batches = 3,
        .masters = torchamp::ShardedMasterWeightsOptions{.dtype = at::kBFloat16},
        .group = group};
  };
  const auto make = [](auto parameters) {
    return std::make_unique<torchamp::FusedAdamW>(parameters, torch::optim::AdamWOptions(0.02));
  };
  Net calm = make_net(at::kCPU), shaken = make_net(at::kCPU);
  TrainingStep expected(calm, make, options()), train(shaken, make, options());
  const auto loss = [&](Net& net, int number) {
    const auto batch = batch_of(at::kCPU, 1000 * group->getRank() + number);
    return loss_of(net->forward(batch[0]), batch);
  };
  train([&] { return loss(shaken, 70); });
  EXPECT_ERROR(train([&]() -> Tensor {
                 train.scaler().scale(loss(shaken, 71)).backward();
                 TORCH_CHECK(false, "no second part");
               }),
               "no second part");
  EXPECT_EQ(train.pending(), 0);
  for (int i = 0; i < 6; ++i) {
    expected([&] { return loss(calm, i); });
    train([&] { return loss(shaken, i); });
  }
  expect_same_weights(shaken, calm);
}

TEST(TrainingGroup, SpreadsMastersOverTheProcesses) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const torchamp::ShardedMasterWeightsOptions options{.dtype = at::kBFloat16};
  const GradScalerOptions scaling{.init_scale = 64.};
  Net by_hand = make_net(at::kCPU), stepped = make_net(at::kCPU);
  torchamp::ShardedMasterWeights masters(by_hand, group, options);
  torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(0.02));
  GradScaler scaler(scaling);
  TrainingStep train(stepped,
                     [](auto parameters) {
                       return std::make_unique<torchamp::FusedAdamW>(
                           parameters, torch::optim::AdamWOptions(0.02));
                     },
                     {.scaler = scaling,
                      .max_grad_norm = 0.1,
                      .micro_batches = 2,
                      .masters = options,
                      .group = group});
  for (int i = 0; i < 6; ++i) {
    const auto batch = batch_of(at::kCPU, 1000 * group->getRank() + i);
    if (i % 2 == 0) optimizer.zero_grad();
    {
      const auto no_sync = masters.no_sync(i % 2 == 0);
      Tensor loss;
      {
        const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
        loss = loss_of(by_hand->forward(batch[0]), batch);
      }
      scaler.scale(loss / 2).backward();
    }
    train([&] { return loss_of(stepped->forward(batch[0]), batch); });
    if (i % 2 == 0) continue;
    torchamp::clip_grad_norm_(scaler, optimizer, 0.1);
    scaler.step(optimizer);
    scaler.update();
    masters.copy_to_model();
    expect_same_bits(stepped, by_hand);
  }
  expect_same_everywhere(group, stepped->parameters());
  EXPECT_EQ(train.masters<torchamp::ShardedMasterWeights>().parameters().size(),
            masters.parameters().size());
}

TEST(TrainingGroup, GoesOnFromAFileOfAllProcessesAsIfItHadNotBeenStopped) {
  const TemporaryFolder folder;
  if (!child_role()) return Launch(2, folder.environment()).expect_success();
  const auto group = make_group();
  for (const std::string name : {"none", "full", "sharded", "none of two", "sharded of two"}) {
    SCOPED_TRACE(name);
    const std::string masters = name.substr(0, name.find(' '));
    const bool has_two = name != masters;  // optimizers
    const std::string path = (folder / (name + ".pt")).string();
    const auto options = [&] {
      torchamp::TrainingStepOptions some{
          .dtype = at::kBFloat16,
          .scaler = GradScalerOptions{.init_scale = 64., .growth_interval = 3},
          .max_grad_norm = 0.1,
          .micro_batches = 2,
          .group = group};
      if (masters == "full") some.masters = torchamp::MasterWeightsOptions{.dtype = at::kBFloat16};
      if (masters == "sharded") {
        some.masters = torchamp::ShardedMasterWeightsOptions{.dtype = at::kBFloat16};
      }
      return some;
    };
    const auto make = [has_two](std::vector<Tensor> parameters) {
      std::vector<std::unique_ptr<torch::optim::Optimizer>> made;
      if (has_two) {
        made.push_back(std::make_unique<torchamp::FusedSGD>(
            std::vector<Tensor>{parameters.back()}, torch::optim::SGDOptions(0.02).momentum(0.9)));
        parameters.pop_back();
      }
      made.push_back(
          std::make_unique<torchamp::FusedAdamW>(parameters, torch::optim::AdamWOptions(0.02)));
      return made;
    };
    const auto run = [&](TrainingStep& train, Net& net, int from, int to) {
      for (int i = from; i < to; ++i) {
        const auto batch = batch_of(at::kCPU, 1000 * group->getRank() + i);
        train([&] { return loss_of(net->forward(batch[0]), batch); });
      }
    };
    Net net = make_net(at::kCPU), other = make_net(at::kCPU);
    TrainingStep train(net, make, options());
    EXPECT_FALSE(train.load(path));
    run(train, net, 0, 3);
    EXPECT_ERROR(train.save(path), "1 of 2 micro-batches are pending");
    EXPECT_ERROR((void)train.load(path), "1 of 2 micro-batches are pending");
    run(train, net, 3, 4);  // the window that was refused is whole
    train.save(path);
    run(train, net, 4, 10);

    TrainingStep goes_on(other, make, options());
    ASSERT_TRUE(goes_on.load(path));
    EXPECT_EQ(goes_on.steps(), 2);
    run(goes_on, other, 4, 10);
    expect_same_weights(other, net);
    if (group->getRank() == 0) expect_same_bits(other, net);  // whose buffers the file has
    EXPECT_EQ(goes_on.scaler().state_dict(), train.scaler().state_dict());
  }
}

TEST(TrainingGroup, RefusesInvalidOptionsAtConstruction) {
  if (ran_in_processes(1)) return;
  const auto group = make_group();
  Net net = make_net(at::kCPU);
  torchamp::FusedAdamW optimizer(net->parameters());
  EXPECT_ERROR(
      TrainingStep(net, optimizer, {.group = group, .capture = torchamp::CudaGraphOptions{}}),
      "capture and group cannot be together");
  EXPECT_ERROR(TrainingStep(net, optimizer, {.group = torchamp::ProcessGroupPtr()}),
               "the group is null");
  const auto make = [](auto parameters) {
    return std::make_unique<torchamp::FusedAdamW>(parameters);
  };
  EXPECT_ERROR(TrainingStep(net, make, {.masters = torchamp::ShardedMasterWeightsOptions{}}),
               "need a process group. Set .group");
}

}  // namespace

#endif
