// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "support/sharded.h"
#include "support/warnings.h"
#include "torchamp/clip_grad.h"
#include "torchamp/closure_step.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"

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

TEST(ShardedMasters, KeepOneScaleIfAProcessHasNoGradients) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Linear net(4, 2);
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.5));
  torchamp::GradScaler scaler({.init_scale = 64., .growth_interval = 2});
  for (const bool bad : {true, false, false}) {
    scaler.scale(net->forward(at::ones({1, 4}, at::kBFloat16)).to(at::kFloat).sum()).backward();
    if (group->getRank() == 1) {
      for (Tensor shard : masters.parameters()) shard.mutable_grad().reset();
    } else if (bad) {
      masters.parameters()[0].mutable_grad().fill_(std::numeric_limits<float>::infinity());
    }
    scaler.step(optimizer);
    scaler.update();
    masters.copy_to_model();
    if (bad) {
      EXPECT_EQ(scaler.get_scale(), 32.);
    }
    optimizer.zero_grad();
  }
  EXPECT_EQ(scaler.get_scale(), 64.) << "two good iterations";
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
  torch::optim::SGD of_model(net->parameters(), 0.1);
  EXPECT_ERROR(scaler.step(of_model), "belongs to a model under master weights");
  torch::optim::LBFGS lbfgs(masters.parameters());
  const char* const not_elementwise = "is not known to treat each element independently";
  EXPECT_ERROR(scaler.unscale_(lbfgs), not_elementwise);
  EXPECT_ERROR(masters.check_optimizer(lbfgs), not_elementwise);
  EXPECT_ERROR(step(scaler, lbfgs, [&] { return loss_of(net, batch_of(rank, 0)); }),
               not_elementwise);
  backward();
  EXPECT_ERROR(masters.copy_to_model(), "no optimizer is known to treat each element");
  torch::optim::SGD sgd(masters.parameters(), 0.1);
  masters.check_optimizer(sgd);
  masters.copy_to_model();
  const Tensor plain = at::ones({2}).set_requires_grad(true);
  plain.mutable_grad() = at::ones({2});
  auto mixed = masters.parameters();
  mixed.push_back(plain);
  EXPECT_ERROR(torchamp::clip_grad_norm_(mixed, 1.), "Clip them separately");
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

TEST(ShardedMasters, RefuseOtherOptimizersOfSplitPiecesThatAFusedOneHas) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  Net net = make_net();
  ShardedMasterWeights masters(net, group,
                               {.dtype = at::kBFloat16, .storage = MasterStorage::split});
  torchamp::FusedSGD fused(masters.parameters(), torch::optim::SGDOptions(0.1));
  torch::optim::SGD sgd(masters.parameters(), 0.1);
  const auto backward = [&] { loss_of(net, batch_of(group->getRank(), 0)).backward(); };
  backward();
  fused.step();
  masters.copy_to_model();
  sgd.zero_grad();
  backward();
  sgd.step();
  EXPECT_ERROR(masters.copy_to_model(), "that no fused optimizer has stepped with");
}

TEST(ShardedMasters, WarnOnceOfAModelThatOthersHaveWritten) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  constexpr const char* text = "ShardedMasterWeights::copy_to_model: the model's weight ";
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    Net net = make_net(0);
    ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16, .storage = storage});
    torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.5));
    const CollectedWarnings warnings;
    const auto step = [&] {
      optimizer.zero_grad();
      loss_of(net, batch_of(group->getRank(), 0)).backward();
      optimizer.step();
      masters.copy_to_model();
    };
    const at::NoGradGuard no_grad_for_writes;
    const auto write = [&] {
      for (const Tensor& parameter : net->parameters()) parameter.detach().mul_(1.);
    };
    const auto train = [&] {
      const at::AutoGradMode with_gradients(true);
      step();
    };
    train();
    write();  // another model's weights, and these again
    write();
    const auto put_back = masters.keep();
    train();
    put_back();
    train();
    EXPECT_EQ(warnings.text(), "");
    for (int i = 0; i < 2; ++i) {
      write();
      train();
    }
    EXPECT_NE(warnings.text().find(text), std::string::npos) << warnings.text();
    EXPECT_EQ(warnings.text().find(text), warnings.text().rfind(text));
  }
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

}  // namespace

#endif
