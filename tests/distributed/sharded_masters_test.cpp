// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <signal.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "support/memory_meter.h"
#include "support/staging_group.h"
#include "support/temporary_folder.h"
#include "torchamp/clip_grad.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using torchamp::MasterStorage;
using torchamp::MasterWeights;
using torchamp::ShardedMasterWeights;

/// Of sizes that no number of processes divides, with a norm that stays fp32.
struct NetImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor hidden = norm(first(x.to(first->weight.scalar_type())).to(at::kFloat));
    return last(hidden.to(last->weight.scalar_type())).to(at::kFloat);
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(5, 7))};
  torch::nn::LayerNorm norm{
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(7, 3))};
};
TORCH_MODULE(Net);

Net make_net(std::uint64_t seed = 1) {
  at::manual_seed(seed);
  return Net();
}

/// The batch of one process in one step, the same wherever it is made.
Tensor batch_of(int rank, int step) {
  at::manual_seed(static_cast<std::uint64_t>(1000 * step + rank + 7));
  return at::randn({6, 5});
}

Tensor loss_of(Net& net, const Tensor& batch) {
  return net->forward(batch).pow(2).mean();
}

using Make = std::unique_ptr<torch::optim::Optimizer> (*)(std::vector<Tensor>);

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(std::vector<Tensor> parameters) {
  Options options(0.05);
  if constexpr (std::is_same_v<Options, torch::optim::SGDOptions>) options.momentum(0.9);
  return std::make_unique<Optimizer>(std::move(parameters), options);
}

const std::vector<std::pair<std::string, Make>>& kinds() {
  using namespace torch::optim;
  static const std::vector<std::pair<std::string, Make>> all{
      {"FusedAdamW", make<torchamp::FusedAdamW, AdamWOptions>},
      {"FusedSGD", make<torchamp::FusedSGD, SGDOptions>},
      {"FusedAdagrad", make<torchamp::FusedAdagrad, AdagradOptions>},
      {"AdamW", make<AdamW, AdamWOptions>},
      {"RMSprop", make<RMSprop, RMSpropOptions>}};
  return all;
}

void expect_same_bits(torch::nn::Module& a, torch::nn::Module& b) {
  const auto left = a.named_parameters(), right = b.named_parameters();
  for (const auto& item : left) {
    EXPECT_EQ(item.value().scalar_type(), right[item.key()].scalar_type());
    EXPECT_TRUE(at::equal(item.value(), right[item.key()])) << item.key();
  }
}

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

/// A run whose processes all have the same data, so that its weights do not depend on how many they
/// are.
struct Training {
  Training(const torchamp::ProcessGroupPtr& group, MasterStorage storage, Make make_optimizer,
           const std::string& file)
      : masters(net, group, {.dtype = at::kBFloat16, .storage = storage, .bucket_bytes = 100}),
        optimizer(make_optimizer(masters.parameters())),
        checkpoint(file) {
    checkpoint.add("model", masters).add("optimizer", *optimizer).add("scaler", scaler);
    checkpoint.add("step", step);
  }

  template <class Masters>
  static void train_one_step(Net& net, Masters& masters, torch::optim::Optimizer& optimizer,
                             torchamp::GradScaler& scaler, std::int64_t& step) {
    optimizer.zero_grad();
    scaler.scale(loss_of(net, batch_of(0, static_cast<int>(step)))).backward();
    masters.take_gradients();
    scaler.step(optimizer);
    scaler.update();
    masters.copy_to_model();
    ++step;
  }
  void train(std::int64_t until) {
    while (step < until) train_one_step(net, masters, *optimizer, scaler, step);
  }

  Net net = make_net();
  ShardedMasterWeights masters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  torchamp::GradScaler scaler{{.init_scale = 64., .growth_interval = 2}};
  std::int64_t step = 0;
  torchamp::TrainingCheckpoint checkpoint;
};

/// The fp32 weights of a file.
std::vector<Tensor> weights_in(const std::string& file) {
  Net net;
  torch::load(net, file);
  return net->parameters();
}

TEST(ShardedMasters, GoOnOnAnyNumberOfProcessesFromOneFile) {
  const TemporaryFolder folder;
  if (!child_role()) {
    for (const auto& [stage, processes] : {std::pair{"write", 4}, {"hand on", 3}, {"go on", 2}}) {
      auto environment = folder.environment();
      environment["TORCHAMP_TEST_STAGE"] = stage;
      Launch(processes, environment).expect_success();
    }
    // An unsharded run reads it, too.
    for (const std::size_t kind : {0, 4}) {
      const std::string name = kinds()[kind].first;
      Net net = make_net(5);
      MasterWeights masters(net, {.dtype = at::kBFloat16});
      const auto optimizer = kinds()[kind].second(masters.parameters());
      torchamp::GradScaler scaler;
      std::int64_t step = 0;
      torchamp::TrainingCheckpoint checkpoint(folder / (name + ".pt"));
      checkpoint.add("model", masters).add("optimizer", *optimizer).add("scaler", scaler);
      checkpoint.add("step", step);
      ASSERT_TRUE(checkpoint.load_shared());
      while (step < 5) Training::train_one_step(net, masters, *optimizer, scaler, step);
      torch::save(masters, folder / "unsharded.pt");
      const auto expected = weights_in(folder / (name + "-model.pt"));
      const auto weights = weights_in(folder / "unsharded.pt");
      for (std::size_t i = 0; i < weights.size(); ++i) {
        EXPECT_TRUE(at::equal(weights[i], expected[i])) << name;
      }
    }
    return;
  }
  const std::string stage = std::getenv("TORCHAMP_TEST_STAGE");
  const auto group = make_group();
  for (const std::size_t kind : {0, 4}) {
    const auto& [name, make_optimizer] = kinds()[kind];
    SCOPED_TRACE(name);
    const MasterStorage storage = kind == 0 ? MasterStorage::split : MasterStorage::full;
    Training run(group, storage, make_optimizer, folder / (name + ".pt"));
    const std::string result = folder / (name + "-model.pt");
    if (stage == "write") {
      EXPECT_FALSE(torchamp::load_together(run.checkpoint, group));
      run.train(3);
      torchamp::save_together(run.checkpoint, group);
      if (group->getRank() == 0) torch::save(run.masters, folder / (name + "-3.pt"));
      run.train(5);
      run.masters.gather();
      if (group->getRank() == 0) {
        torch::save(run.masters, result);
      } else {
        EXPECT_ERROR(torch::save(run.masters, result), "this on process 0");
      }
      EXPECT_TRUE(torchamp::load_together(run.checkpoint, group));
      run.train(4);
      EXPECT_ERROR(torch::save(run.masters, result), "Call gather() on all of them");
      continue;
    }
    EXPECT_ERROR(torchamp::load_together(run.checkpoint, group), "Go on with as many");
    EXPECT_TRUE(run.checkpoint.load_shared());
    EXPECT_EQ(run.step, 3);
    const bool goes_on = stage == "go on";  // thirds of fp32 gradients are not exact
    if (goes_on) run.train(5);
    run.masters.gather();
    if (group->getRank() == 0) torch::save(run.masters, folder / "again.pt");
    if (!goes_on) torchamp::save_together(run.checkpoint, group);
    if (group->getRank() != 0) continue;
    const auto expected = weights_in(goes_on ? result : std::string(folder / (name + "-3.pt")));
    const auto weights = weights_in(folder / "again.pt");
    for (std::size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(at::equal(weights[i], expected[i])) << i;
    }
  }
}

TEST(ShardedMasters, AreAsTheyWereAfterAFileThatDoesNotFit) {
  const TemporaryFolder folder;
  if (!child_role()) return Launch(2, folder.environment()).expect_success();
  const auto group = make_group();
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    Training sgd(group, storage, kinds()[1].second, folder / "run.pt");
    sgd.train(2);
    torchamp::save_together(sgd.checkpoint, group);
    Training adam(group, storage, kinds()[0].second, folder / "run.pt");
    adam.train(1);
    std::vector<Tensor> before = adam.net->parameters();
    for (Tensor& parameter : before) parameter = parameter.detach().clone();
    EXPECT_ERROR(torchamp::load_together(adam.checkpoint, group), "'optimizer' in");
    EXPECT_EQ(adam.step, 1);
    const auto after = adam.net->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
    adam.train(3);
    Training other(group, storage, kinds()[0].second, folder / "other.pt");
    other.train(3);
    expect_same_bits(*adam.net, *other.net);
  }
}

TEST(ShardedMasters, GiveAnErrorWhenAnotherProcessDiesOrStallsAndTheFileIsWhole) {
  const TemporaryFolder folder;
  if (!child_role()) {
    for (const char* const stage : {"dies", "stalls"}) {
      auto environment = folder.environment();
      environment["TORCHAMP_TEST_STAGE"] = stage;
      Launch launch(2, environment);
      if (std::string(stage) == "dies") {
        EXPECT_EQ(launch.rank(1).wait(), -SIGKILL);
      }
      EXPECT_EQ(launch.rank(0).wait(), 0) << "the survivor";
    }
    return;
  }
  const bool stalls = std::string(std::getenv("TORCHAMP_TEST_STAGE")) == "stalls";
  const auto group = make_group(std::chrono::seconds(stalls ? 2 : 60));
  Training run(group, MasterStorage::full, kinds()[0].second, folder / "run.pt");
  run.train(2);
  torchamp::save_together(run.checkpoint, group);
  if (group->getRank() == 1) raise(stalls ? SIGSTOP : SIGKILL);
  EXPECT_THROW(run.train(4), std::exception);
  EXPECT_ERROR(run.masters.copy_to_model(), "ShardedMasterWeights::copy_to_model: ");
  EXPECT_ERROR(torchamp::save_together(run.checkpoint, group), "save_together: ");
  EXPECT_TRUE(run.checkpoint.load(0, 2));
  EXPECT_EQ(run.step, 2);
}

}  // namespace

#endif
