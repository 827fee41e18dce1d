// SPDX-License-Identifier: BSD-3-Clause
// What the processes of sharded masters send each other, and what they agree on.
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/launch.h"
#include "support/sharded.h"
#include "support/staging_group.h"
#include "support/temporary_folder.h"
#include "torchamp/clip_grad.h"
#include "torchamp/distributed/checkpoint.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"
#if TORCHAMP_CUDA_GRAPHS && __has_include(<nccl.h>)  // a CUDA build, with CUDA's headers
#define TORCHAMP_TEST_NCCL
#include "torchamp/distributed/nccl.h"
#endif

namespace {

using at::Tensor;
using sharded::batch_of;
using sharded::loss_of;
using sharded::make_net;
using sharded::maker_of;
using sharded::Net;
using torchamp::MasterStorage;
using torchamp::MasterWeights;
using torchamp::ShardedMasterWeights;

TEST(ShardedMasters, SendABucketWhileBackwardGoesOn) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  Net net = make_net();
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16, .bucket_bytes = 50});
  static std::vector<std::string> ops;
  static std::mutex mutex;
  const Tensor loss = loss_of(net, batch_of(group->getRank(), 0));
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
        const std::lock_guard lock(mutex);
        ops.emplace_back(op.name());
        return nullptr;
      }));
  loss.backward();
  at::removeCallback(handle);
  const auto sent = std::ranges::find(ops, "c10d::alltoall_base_");
  ASSERT_NE(sent, ops.end());
  EXPECT_NE(std::find(sent, ops.end(), "aten::mm"), ops.end());
}

TEST(ShardedMasters, HaveTwoBucketsUnderWayAndNeverThree) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::Linear(2, 2),
                            torch::nn::Linear(2, 2));
  ShardedMasterWeights masters(net.ptr(), group, {.dtype = at::kBFloat16, .bucket_bytes = 1});
  static int sent = 0, under_way = 0, most = 0;
  static std::mutex mutex;
  const Tensor loss = net->forward(at::ones({1, 3}, at::kBFloat16)).sum();
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
        const std::lock_guard lock(mutex);
        const auto name = op.operator_name();
        if (!name) return nullptr;
        if (name->name == "c10d::alltoall_base_") {
          ++sent;
          most = std::max(most, ++under_way);
        } else if (name->name == "aten::div_" && name->overload_name == "Scalar") {
          --under_way;  // the average of a bucket that has come
        }
        return nullptr;
      }));
  loss.backward();
  at::removeCallback(handle);
  EXPECT_EQ(sent, 6);
  EXPECT_EQ(most, 2);
  EXPECT_EQ(under_way, 0);
}

TEST(ShardedMasters, SendZerosForWhatOneProcessLeavesUnused) {
  if (ran_in_processes(2)) return;
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  ASSERT_TRUE(at::empty({8}).isnan().all().item<bool>()) << "fresh memory";
  const auto group = make_group();
  torch::nn::Linear net(2, 2);  // one bucket, without padding
  ShardedMasterWeights masters(net, group,
                               {.dtype = at::kBFloat16, .find_unused_parameters = true});
  Tensor loss = net->weight.sum();
  if (group->getRank() == 1) loss = loss + net->bias.sum();
  loss.backward();
  EXPECT_TRUE(at::equal(masters.parameters()[0].grad(), at::ones({2})));
  EXPECT_TRUE(at::equal(masters.parameters()[1].grad(), at::full({1}, 0.5F)));
}

TEST(ShardedMasters, AddUpWhatEveryBackwardSends) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Linear net(3, 1);
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  for (const double factor : {256., 1.}) {  // 257 is no bf16 number
    (net->weight.sum() * (factor * (group->getRank() + 1)) + net->bias.sum()).backward();
  }
  EXPECT_TRUE(at::equal(masters.parameters()[0].grad().narrow(0, 0, 1), at::full({1}, 385.5F)));
  EXPECT_FALSE(net->weight.grad().defined());
}

TEST(ShardedMasters, SendGradientsInTheDtypeOfChoiceAndSumThemInFp32) {
  if (ran_in_processes(2)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  const int rank = group->getRank();
  constexpr std::int64_t numbers = 36 + 8 + 22 + 4;  // with the padding of 35, 7, 21 and 3
  std::vector<Tensor> weights;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    at::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::Linear(7, 3));
    torchamp::ShardedMasterWeightsOptions options{.dtype = at::kBFloat16, .bucket_bytes = 60};
    if (dtype != at::kFloat) options.reduce_dtype = dtype;
    ShardedMasterWeights masters(net.ptr(), group, options);
    torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(0.05));
    for (int step = 0; step < 3; ++step) {
      const std::int64_t sent = group->exchanged_bytes, gathered = group->gathered_bytes;
      optimizer.zero_grad();
      net->forward(batch_of(rank, step).to(at::kBFloat16)).to(at::kFloat).pow(2).mean().backward();
      EXPECT_EQ(group->exchanged_bytes - sent, numbers * (dtype == at::kFloat ? 4 : 2));
      optimizer.step();
      masters.copy_to_model();
      EXPECT_EQ(group->gathered_bytes - gathered, numbers / 2 * 2);  // half of them, in bf16
    }
    if (dtype == at::kFloat) {
      for (const Tensor& weight : net->parameters()) weights.push_back(weight.detach().clone());
    }
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Tensor weight = net->parameters()[i].detach();
      // The gradients of bf16 weights are bf16.
      EXPECT_TRUE(dtype == at::kHalf ? at::allclose(weight, weights[i], 0.02, 0.02)
                                     : at::equal(weight, weights[i]));
    }

    torchamp::GradScaler scaler({.init_scale = 65536.});
    optimizer.zero_grad();
    scaler.scale(net->forward(at::ones({8, 5}, at::kBFloat16)).to(at::kFloat).sum()).backward();
    EXPECT_EQ(scaler.step(optimizer).stepped(), dtype != at::kHalf) << "65536 is no fp16 number";
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), dtype == at::kHalf ? 32768. : 65536.);
  }
}

TEST(ShardedMasters, AgreeOnTheNormThatIsClippedAndOnWhetherToStep) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const int rank = group->getRank();
  for (const bool fused : {true, false}) {
    for (const double norm_type : {2., 1., 3., static_cast<double>(INFINITY)}) {
      Net net = make_net(), alone = make_net();
      ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
      MasterWeights of_alone(alone, {.dtype = at::kBFloat16, .main_gradients = true});
      const auto optimizer = maker_of(fused ? "FusedAdamW" : "AdamW")(masters.parameters());
      const auto optimizer_alone = maker_of(fused ? "FusedAdamW" : "AdamW")(of_alone.parameters());
      torchamp::GradScaler scaler({.init_scale = 1024., .growth_interval = 2});
      torchamp::GradScaler scaler_alone({.init_scale = 1024., .growth_interval = 2});
      for (int step = 0; step < 4; ++step) {
        const bool overflows = step == 2;  // on process 1
        const auto loss = [&](Net& model, int of) {
          const Tensor result = loss_of(model, batch_of(of, step));
          return overflows && of == 1 ? result * INFINITY : result;
        };
        optimizer->zero_grad();
        scaler.scale(loss(net, rank)).backward();
        const Tensor norm = torchamp::clip_grad_norm_(scaler, *optimizer, 0.1, norm_type);
        EXPECT_EQ(scaler.step(*optimizer).stepped(), !overflows);
        scaler.update();
        masters.copy_to_model();

        optimizer_alone->zero_grad();
        for (const int of : {0, 1}) scaler_alone.scale(loss(alone, of) / 2).backward();
        const Tensor expected =
            torchamp::clip_grad_norm_(scaler_alone, *optimizer_alone, 0.1, norm_type);
        scaler_alone.step(*optimizer_alone);
        scaler_alone.update();
        of_alone.copy_to_model();
        if (!overflows) {
          EXPECT_NEAR(norm.item<double>(), expected.item<double>(), 1e-6 * expected.item<double>());
        }
        expect_same_everywhere(group, {norm.nan_to_num()});
        EXPECT_EQ(scaler.get_scale(), scaler_alone.get_scale());
      }
      // Clipping makes the norms differ in the last bit; 16 bits may round to the other side.
      const auto left = net->named_parameters(), right = alone->named_parameters();
      for (const auto& item : left) {
        EXPECT_TRUE(at::allclose(item.value(), right[item.key()], /*rtol=*/1. / 128, 1e-5))
            << item.key();
      }
    }
  }
}

TEST(ShardedMasters, NeverDivergeIfOnlyOneProcessOverflows) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const bool unscales : {false, true}) {
    torch::nn::Linear net(4, 2);
    ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
    torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
    torchamp::GradScaler scaler({.init_scale = 2.});
    // The second row of the weight is process 1's piece.
    const Tensor factor = at::tensor({1.F, INFINITY}).unsqueeze(1);
    scaler.scale((net->weight.to(at::kFloat) * factor).sum() + net->bias.to(at::kFloat).sum())
        .backward();
    const bool is_finite = masters.parameters()[0].grad().isfinite().all().item<bool>();
    EXPECT_EQ(is_finite, group->getRank() == 0);
    if (unscales) scaler.unscale_(optimizer);
    EXPECT_FALSE(scaler.step(optimizer).stepped());
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 1.);
  }
}

TEST(ShardedMasters, TrainOnTheSimulatedDeviceAsOnTheCpu) {
  SKIP_WITHOUT(at::kPrivateUse1);
  if (ran_in_processes(2)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    const auto trained = [&](at::Device device, bool clips) {
      at::manual_seed(1);
      auto net = to_device(torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::Linear(7, 3)),
                           device);
      ShardedMasterWeights masters(
          net.ptr(), group, {.dtype = at::kBFloat16, .storage = storage, .bucket_bytes = 60});
      torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(0.05));
      torchamp::GradScaler scaler({.init_scale = 64.});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Tensor x = batch_of(group->getRank(), step).to(at::kBFloat16).to(device);
        Tensor loss = net->forward(x).to(at::kFloat).pow(2).mean();
        if (step == 1 && group->getRank() == 1) loss = loss * INFINITY;
        scaler.scale(loss).backward();
        if (clips) torchamp::clip_grad_norm_(scaler, optimizer, 0.1);
        EXPECT_EQ(scaler.step(optimizer).stepped(), step != 1);
        scaler.update();
        masters.copy_to_model();
      }
      std::vector<Tensor> weights;
      for (const Tensor& weight : net->parameters()) weights.push_back(weight.detach().cpu());
      masters.gather();
      if (group->getRank() == 0) {
        std::ostringstream file;
        torch::save(masters, file);
        EXPECT_FALSE(file.str().empty());
      }
      return weights;
    };
    for (const bool clips : {false, true}) {
      const auto here = trained(at::kCPU, clips), there = trained(simulated::sim0, clips);
      for (std::size_t i = 0; i < here.size(); ++i) {
        EXPECT_TRUE(clips ? at::allclose(there[i], here[i], 1. / 128, 1e-5)
                          : at::equal(there[i], here[i]));
      }
    }
  }
}

// As with NCCL alone, which takes no tensor of the host.
TEST(ShardedMasters, AgreeOverASimulatedDeviceIfTheGroupHasNoOther) {
  SKIP_WITHOUT(at::kPrivateUse1);
  if (ran_in_processes(2)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  group->take_only(at::kPrivateUse1);
  auto net = to_device(torch::nn::Linear(5, 3), simulated::sim0);
  const std::int64_t bucket_bytes = group->getRank() == 0 ? 60 : 80;
  EXPECT_ERROR(ShardedMasterWeights(net, group, {.bucket_bytes = bucket_bytes}),
               "ShardedMasterWeights: process 1 has another bucket_bytes than process 0");
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(0.05));
  net->forward(at::ones({2, 5}, net->weight.options())).sum().backward();
  optimizer.step();
  masters.copy_to_model();
  std::int64_t step = 1;
  const TemporaryFolder folder;
  torchamp::TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("model", masters).add("optimizer", optimizer).add("step", step);
  torchamp::save_together(checkpoint, group);
  EXPECT_EQ(folder.files(), group->getRank() == 0 ? 1 : 0);
}

TEST(ShardedMasters, ExchangeOverNccl) {
  SKIP_WITHOUT(at::kCUDA);
#ifdef TORCHAMP_TEST_NCCL
  if (at::getNumGPUs() < 2) GTEST_SKIP() << "NCCL needs a CUDA device for each of two processes";
  if (ran_in_processes(2)) return;
  const auto environment = torchamp::ProcessEnvironment::read();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank));
  const c10::DeviceGuard on_device(device);
  const auto group = make_group();
  torchamp::add_nccl(*group);
  torch::nn::Linear net(4, 2);
  net->to(device);
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(1.));
  const Tensor before = net->bias.detach().to(at::kFloat);
  (net->bias.to(at::kFloat) * (group->getRank() + 1.))
      .sum()
      .add(net->weight.to(at::kFloat).sum())
      .backward();
  EXPECT_EQ(torchamp::clip_grad_norm_(optimizer, 100.).item<float>(), std::sqrt(8.F + 2 * 2.25F));
  optimizer.step();
  masters.copy_to_model();
  EXPECT_TRUE(at::allclose(net->bias.detach().to(at::kFloat), before - 1.5, 0.01, 0.01));
#else
  GTEST_SKIP() << "no nccl.h beside CUDA's headers";
#endif
}

}  // namespace

#endif
