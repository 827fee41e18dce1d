// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/launch.h"
#include "support/memory_meter.h"
#include "support/out_of_memory.h"
#include "support/sharded.h"
#include "support/staging_group.h"
#include "torchamp/clip_grad.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#if TORCHAMP_CUDA_GRAPHS && __has_include(<nccl.h>)  // a CUDA build, with CUDA's headers
#define TORCHAMP_TEST_NCCL
#include "torchamp/distributed/nccl.h"
#endif

namespace {

using at::Tensor;
using sharded::batch_of;
using sharded::expect_same_bits;
using sharded::kinds;
using sharded::loss_of;
using sharded::make_net;
using sharded::Net;
using torchamp::MasterStorage;
using torchamp::MasterWeights;
using torchamp::ShardedMasterWeights;

void expect_equal_to_one_process(int processes) {
  if (ran_in_processes(processes)) return;
  const auto group = make_group();
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    for (const auto& [name, make_optimizer] : kinds()) {
      if (storage == MasterStorage::split && !name.starts_with("Fused")) continue;
      SCOPED_TRACE(name + (storage == MasterStorage::split ? ", split" : ", full"));
      Net net = make_net(static_cast<std::uint64_t>(group->getRank())), alone = make_net(0);
      ShardedMasterWeights masters(
          net, group, {.dtype = at::kBFloat16, .storage = storage, .bucket_bytes = 200});
      MasterWeights of_alone(alone,
                             {.dtype = at::kBFloat16, .storage = storage, .main_gradients = true});
      const auto optimizer = make_optimizer(masters.parameters());
      const auto optimizer_alone = make_optimizer(of_alone.parameters());
      masters.check_optimizer(*optimizer);
      for (int step = 0; step < 4; ++step) {
        optimizer->zero_grad();
        loss_of(net, batch_of(group->getRank(), step)).backward();
        optimizer->step();
        masters.copy_to_model();

        optimizer_alone->zero_grad();
        for (int rank = 0; rank < processes; ++rank)
          loss_of(alone, batch_of(rank, step)).backward();
        for (const Tensor& parameter : of_alone.parameters()) {
          parameter.grad().div_(processes);
        }
        optimizer_alone->step();
        of_alone.copy_to_model();
      }
      expect_same_bits(*net, *alone);
    }
  }
}

TEST(ShardedMasters, TrainAsOneProcessBitForBitOnTwo) {
  expect_equal_to_one_process(2);
}
TEST(ShardedMasters, TrainAsOneProcessBitForBitOnFour) {
  expect_equal_to_one_process(4);
}
TEST(ShardedMasters, TrainAsOneProcessBitForBitOnThreeAndInAWorldOfOne) {
  if (!child_role()) Launch(1).expect_success();
  const char* const size = std::getenv("WORLD_SIZE");
  expect_equal_to_one_process(child_role() && std::string(size) == "1" ? 1 : 3);
}

TEST(ShardedMasters, PassOverParametersWithoutElements) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Linear net(3, 2);
  const Tensor none = net->register_parameter("none", at::ones({0, 2}));
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.5));
  const Tensor before = net->bias.detach().clone();
  (net->forward(at::ones({1, 3}, at::kBFloat16)).sum() + none.sum()).backward();
  optimizer.step();
  EXPECT_NO_THROW(masters.copy_to_model());
  EXPECT_FALSE(at::equal(net->bias, before));
}

TEST(ShardedMasters, KeepTheirShareOfMastersAndStatesAlone) {
  if (ran_in_processes(4)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  constexpr std::int64_t width = 128, count = 2 * (width * width + width), bucket = 20'000;
  const auto bytes_of = [&](MasterStorage storage) {
    torch::nn::Sequential net(torch::nn::Linear(width, width), torch::nn::Linear(width, width));
    const MemoryMeter meter;
    ShardedMasterWeights masters(
        net.ptr(), group, {.dtype = at::kBFloat16, .storage = storage, .bucket_bytes = bucket});
    torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(1e-3));
    net->forward(at::ones({1, width}, at::kBFloat16)).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    masters.copy_to_model();
    return meter.bytes();
  };
  // The model, and a quarter of masters and states.
  const std::int64_t full = count * (2 + 12 / 4), split = count * 2 + count * 10 / 4;
  for (const auto& [storage, expected] :
       {std::pair(MasterStorage::full, full), std::pair(MasterStorage::split, split)}) {
    const std::int64_t bytes = bytes_of(storage);
    EXPECT_GE(bytes, expected);
    EXPECT_LT(bytes, expected + bucket);
  }
}

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

TEST(ShardedMasters, AgreeOnTheNormThatIsClippedAndOnWhetherToStep) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const int rank = group->getRank();
  for (const bool fused : {true, false}) {
    for (const double norm_type : {2., 1., 3., static_cast<double>(INFINITY)}) {
      Net net = make_net(), alone = make_net();
      ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
      MasterWeights of_alone(alone, {.dtype = at::kBFloat16, .main_gradients = true});
      const auto optimizer = kinds()[fused ? 0 : 3].second(masters.parameters());
      const auto optimizer_alone = kinds()[fused ? 0 : 3].second(of_alone.parameters());
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

TEST(ShardedMasters, NeverStepApartWhereOnlyOnesPiecesOverflow) {
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

TEST(ShardedMasters, TakeGroupsSchedulersFrozenUnusedAndAccumulatedWeights) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const int rank = group->getRank();
  struct Choice : torch::nn::Module {
    Tensor forward(const Tensor& x, bool uses_b, bool uses_c) {
      Tensor y = a->forward(frozen->forward(x));
      if (uses_b) y = y + b->forward(x);
      if (uses_c) y = y + c->forward(x);
      return y.to(at::kFloat);
    }
    torch::nn::Linear frozen{register_module("frozen", torch::nn::Linear(3, 3))};
    torch::nn::Linear a{register_module("a", torch::nn::Linear(3, 2))};
    torch::nn::Linear b{register_module("b", torch::nn::Linear(3, 2))};
    torch::nn::Linear c{register_module("c", torch::nn::Linear(3, 2))};
  };
  const auto make_model = [] {
    at::manual_seed(3);
    auto model = std::make_shared<Choice>();
    for (const Tensor& parameter : model->frozen->parameters()) parameter.set_requires_grad(false);
    return model;
  };
  const auto groups_of = [](const auto& masters) {
    std::vector<Tensor> decayed, others;
    for (const auto& [name, tensor] : masters.named_parameters()) {
      (name.ends_with("bias") ? others : decayed).push_back(tensor);
    }
    const torch::optim::AdamWOptions options(0.05);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(decayed, std::make_unique<torch::optim::AdamWOptions>(
                                     torch::optim::AdamWOptions(0.05).weight_decay(0.3)));
    groups.emplace_back(others, std::make_unique<torch::optim::AdamWOptions>(
                                    torch::optim::AdamWOptions(0.02).weight_decay(0.)));
    return groups;
  };
  const auto net = make_model(), alone = make_model();
  ShardedMasterWeights masters(
      net, group, {.dtype = at::kBFloat16, .find_unused_parameters = true, .bucket_bytes = 40});
  MasterWeights of_alone(alone, {.dtype = at::kBFloat16, .main_gradients = true});
  EXPECT_EQ(masters.parameters().size(), 6U);
  torchamp::FusedAdamW optimizer(groups_of(masters)), optimizer_alone(groups_of(of_alone));
  torch::optim::StepLR schedule(optimizer, 2, 0.5), schedule_alone(optimizer_alone, 2, 0.5);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    optimizer_alone.zero_grad();
    // Two micro-batches of each process: b is used by one process only, or by the first alone; c in
    // no step but the last.
    const auto loss = [&](Choice& model, int of, int micro_batch) {
      const Tensor x = batch_of(of, 2 * step + micro_batch).narrow(1, 0, 3).to(at::kBFloat16);
      const bool uses_b = step % 2 == 0 ? of == 1 : micro_batch == 0;
      return model.forward(x, uses_b, step == 4).pow(2).mean();
    };
    for (const int micro_batch : {0, 1}) {
      const auto no_sync = masters.no_sync(micro_batch == 0);
      loss(*net, rank, micro_batch).backward();
      EXPECT_EQ(masters.parameters()[0].grad().defined(), micro_batch == 1);
    }
    EXPECT_EQ(masters.parameters()[4].grad().defined(), step == 4) << "used nowhere";
    // The sums of each process, and their sum.
    std::vector<Tensor> sums(6);
    const auto pieces = of_alone.parameters();
    for (const int of : {0, 1}) {
      for (const int micro_batch : {0, 1}) loss(*alone, of, micro_batch).backward();
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        Tensor& gradient = pieces[i].mutable_grad();
        if (!gradient.defined()) continue;
        sums[i] = sums[i].defined() ? sums[i] + gradient : gradient;
        gradient.reset();
      }
    }
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (sums[i].defined()) pieces[i].mutable_grad() = sums[i].div_(2.);
    }
    optimizer.step();
    optimizer_alone.step();
    masters.copy_to_model();
    of_alone.copy_to_model();
    schedule.step();
    schedule_alone.step();
  }
  expect_same_bits(*net, *alone);
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

TEST(ShardedMasters, RefuseWhatTheyCannotDo) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const int rank = group->getRank();
  EXPECT_ERROR(ShardedMasterWeights(make_net(), group, {.dtype = at::kFloat}),
               "ShardedMasterWeights: a model cannot be kept in Float");
  EXPECT_ERROR(ShardedMasterWeights(make_net(), group, {.storage = MasterStorage::split}),
               "ShardedMasterWeights: masters of Half weights cannot be split");
  EXPECT_ERROR(ShardedMasterWeights(make_net(), group, {.reduce_dtype = at::kDouble}),
               "ShardedMasterWeights: gradients cannot be sent as Double");
  EXPECT_ERROR(ShardedMasterWeights(make_net(), group, {.keep_fp32 = {"lats"}}),
               "keep_fp32 names 'lats'");
  EXPECT_ERROR(ShardedMasterWeights(make_net(), group, {.bucket_bytes = 0}), "bucket_bytes is 0");
  torch::nn::Linear expanded(3, 2);
  expanded->weight.set_data(at::ones({2, 1}).expand({2, 3}));
  EXPECT_ERROR(ShardedMasterWeights(expanded, group),
               "ShardedMasterWeights: several elements of the parameter 'weight' (sizes [2, 3]");
  const torch::nn::Linear other(4 + rank, 2);
  EXPECT_ERROR(ShardedMasterWeights(other, group), "process 1 has another model or other options");
  EXPECT_EQ(other->weight.scalar_type(), at::kFloat) << "as it was";

  Net net = make_net();
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  const auto backward = [&] { loss_of(net, batch_of(rank, 0)).backward(); };
  backward();
  torchamp::GradScaler scaler({.init_scale = 1.});
  scaler.scale(at::ones({}));
  torch::optim::LBFGS lbfgs(masters.parameters());
  const char* const not_elementwise = "is not known to treat each element by itself";
  EXPECT_ERROR(scaler.unscale_(lbfgs), not_elementwise);
  EXPECT_ERROR(masters.check_optimizer(lbfgs), not_elementwise);
  EXPECT_ERROR(scaler.step(lbfgs, [&] { return loss_of(net, batch_of(rank, 0)); }),
               not_elementwise);
  backward();
  EXPECT_ERROR(masters.copy_to_model(), "no optimizer is known that steps each element");
  torch::optim::SGD sgd(masters.parameters(), 0.1);
  masters.check_optimizer(sgd);
  masters.copy_to_model();
  const Tensor plain = at::ones({2}).set_requires_grad(true);
  plain.mutable_grad() = at::ones({2});
  auto mixed = masters.parameters();
  mixed.push_back(plain);
  EXPECT_ERROR(torchamp::clip_grad_norm_(mixed, 1.), "Clip them apart");
  EXPECT_ERROR(torchamp::clip_grad_norm_(masters.parameters(), 1., 0.), "the 0-norm counts");

  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
  optimizer.step();
  EXPECT_ERROR(backward(), "Call ShardedMasterWeights::copy_to_model() after each step");
  masters.copy_to_model();
  net->zero_grad();
  EXPECT_ERROR(net->first(at::ones({1, 5}, at::kBFloat16)).sum().backward(),
               "no gradient. Pass {.find_unused_parameters = true}");
  backward();
}

TEST(ShardedMasters, RefuseAModelWhoseMastersOthersKeep) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const char* const error = "the parameter 'first.weight' has a master already";
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    Net net = make_net();
    std::optional<ShardedMasterWeights> sharded;
    std::optional<MasterWeights> own;
    const auto make_sharded = [&] {
      sharded.emplace(net, group,
                      torchamp::ShardedMasterWeightsOptions{
                          .dtype = at::kBFloat16, .keep_fp32 = {"last"}, .storage = storage});
    };
    const auto make_own = [&] {
      own.emplace(net, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16, .storage = storage});
    };
    make_own();
    EXPECT_ERROR(ShardedMasterWeights(net, group, {.dtype = at::kBFloat16}), error);
    own.reset();
    net->to(at::kFloat);
    make_sharded();
    EXPECT_ERROR(MasterWeights(net, {.dtype = at::kBFloat16}), error);
    EXPECT_ERROR(ShardedMasterWeights(net, group, {.dtype = at::kBFloat16}), error);
    loss_of(net, batch_of(group->getRank(), 0)).backward();  // the first go on
    EXPECT_TRUE(sharded->parameters()[0].grad().defined());
    const auto pieces = sharded->parameters();  // may outlive them
    sharded.reset();
    make_own();
    loss_of(net, batch_of(0, 0)).backward();
    own->take_gradients();
    for (const Tensor& parameter : own->parameters()) {
      EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    }
  }
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

/// What a plain model reads from the masters' file.
torch::nn::Linear in_a_plain_model(ShardedMasterWeights& masters) {
  masters.gather();
  std::stringstream file;
  torch::save(masters, file);
  torch::nn::Linear plain(3, 2);
  torch::load(plain, file, at::Device(at::kCPU));
  return plain;
}

TEST(ShardedMasters, AreKeptAndBroughtBackWithoutMemoryOfTheDevice) {
  SKIP_WITHOUT(at::kPrivateUse1);
  if (ran_in_processes(1)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    const auto net = to_device(torch::nn::Linear(3, 2), simulated::sim0);
    ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16, .storage = storage});
    const torchamp::detail::HeldInShares& held = masters;
    auto before = in_a_plain_model(masters);
    const Tensor narrow = net->weight.detach().cpu();
    std::function<void()> back;
    {
      const simulated::AllocationLimit none(0);
      back = held.keep();
    }
    std::stringstream file;
    torch::save(torch::nn::Linear(3, 2), file);
    torch::load(masters, file);
    EXPECT_FALSE(at::equal(net->weight.detach().cpu(), narrow));
    {
      const simulated::AllocationLimit none(0);
      back();
    }
    EXPECT_TRUE(at::equal(net->weight.detach().cpu(), narrow));
    expect_same_bits(*in_a_plain_model(masters), *before);
  }
}

TEST(ShardedMasters, LeaveTheModelInFp32AndLoadAllOrNothingWhereMemoryRunsOut) {
  SKIP_WITHOUT(at::kPrivateUse1);
  if (ran_in_processes(1)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    const auto net = to_device(torch::nn::Linear(3, 2), simulated::sim0);
    torch::nn::Linear before(3, 2), other(3, 2);
    before->weight.set_data(net->weight.detach().cpu());
    before->bias.set_data(net->bias.detach().cpu());
    std::optional<ShardedMasterWeights> masters;
    EXPECT_GE(until_memory_suffices(
                  [&] {
                    masters.emplace(net, group,
                                    torchamp::ShardedMasterWeightsOptions{.dtype = at::kBFloat16,
                                                                          .storage = storage});
                  },
                  [&] {
                    EXPECT_TRUE(at::equal(net->weight.cpu(), before->weight));
                    EXPECT_TRUE(at::equal(net->bias.cpu(), before->bias));
                  }),
              4);
    expect_same_bits(*in_a_plain_model(*masters), *before);

    std::stringstream file;
    torch::save(other, file);
    EXPECT_GE(until_memory_suffices(
                  [&] {
                    file.seekg(0);
                    torch::load(*masters, file);
                  },
                  [&] { expect_same_bits(*in_a_plain_model(*masters), *before); }),
              2);
    expect_same_bits(*in_a_plain_model(*masters), *other);
  }
}

TEST(ShardedMasters, ExchangeOverNccl) {
  SKIP_WITHOUT(at::kCUDA);
#ifdef TORCHAMP_TEST_NCCL
  if (at::getNumGPUs() < 2) GTEST_SKIP() << "NCCL needs a CUDA device for each of two processes";
  if (ran_in_processes(2)) return;
  const auto environment = torchamp::ProcessEnvironment::read();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank));
  at::accelerator::setDeviceIndex(device.index());
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
