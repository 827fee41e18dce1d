// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <signal.h>
#include <torch/serialize.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/launch.h"
#include "support/sharded.h"
#include "support/staging_group.h"
#include "support/state_tensors.h"
#include "support/temporary_folder.h"
#include "support/tolerances.h"
#include "torchamp/distributed/checkpoint.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using sharded::batch_of;
using sharded::expect_same_bits;
using sharded::kinds;
using sharded::loss_of;
using sharded::Make;
using sharded::make_net;
using sharded::maker_of;
using sharded::Net;
using torchamp::MasterStorage;
using torchamp::MasterWeights;
using torchamp::ShardedMasterWeights;

/// A run whose processes all have the same data, so that its weights do not depend on how many they
/// are.
struct ShardedRun {
  ShardedRun(const torchamp::ProcessGroupPtr& group, MasterStorage storage, Make make_optimizer,
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

/// A line through 0-dimensional parameters.
struct ScalarsImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x * slope + offset; }
  Tensor slope{register_parameter("slope", at::full({}, 0.5))};
  Tensor offset{register_parameter("offset", at::full({}, 0.25))};
};
TORCH_MODULE(Scalars);

TEST(ShardedCheckpoint, HoldParametersWithoutDimensions) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const std::unique_ptr<TemporaryFolder> folder =
      group->getRank() == 0 ? std::make_unique<TemporaryFolder>() : nullptr;
  for (const auto& [name, make] : kinds()) {
    Scalars net, other;
    ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
    const auto optimizer = make(masters.parameters());
    masters.check_optimizer(*optimizer);
    const auto step = [&](Scalars& of, ShardedMasterWeights& with, torch::optim::Optimizer& by) {
      of->zero_grad();
      of->forward(at::ones({3}, at::kBFloat16)).sum().backward();
      by.step();
      with.copy_to_model();
    };
    step(net, masters, *optimizer);
    torchamp::TrainingCheckpoint checkpoint(folder ? *folder / "run.pt" : "");
    checkpoint.add("model", masters).add("optimizer", *optimizer);
    torchamp::save_together(checkpoint, group);
    if (!folder) continue;
    MasterWeights unsharded(other, {.dtype = at::kBFloat16});
    const auto alone = make(unsharded.parameters());
    torchamp::TrainingCheckpoint read(*folder / "run.pt");
    read.add("model", unsharded).add("optimizer", *alone);
    ASSERT_TRUE(read.load_shared()) << name;
    expect_same_bits(*net, *other);
  }
}

/// An unused parameter, one without dimensions, a matrix, and one whose rows are not together.
struct LayoutsImpl : torch::nn::Module {
  explicit LayoutsImpl(bool transposes = true) {
    at::manual_seed(2);
    const Tensor scalar = at::full({}, 0.5), matrix = at::randn({3, 2});
    const Tensor transposed = at::randn({7, 5}).t(), unused = at::randn({4});
    register_parameter("unused", unused);
    register_parameter("scalar", scalar);
    register_parameter("matrix", matrix);
    register_parameter("transposed", transposes ? transposed.clone() : transposed.contiguous());
  }
};
TORCH_MODULE(Layouts);

/// Numbers that 16 bits hold, another for each element of a weight.
Tensor gradient_of(const Tensor& weight) {
  return at::arange(1., weight.numel() + 1.).view(weight.sizes());
}

/// The states in a file for each parameter of a plain model.
std::vector<std::vector<Tensor>> states_in(const std::string& file, Make make) {
  const auto parameters = Layouts(/*transposes=*/false)->parameters();
  const auto optimizer = make(parameters);
  torchamp::TrainingCheckpoint checkpoint(file);
  checkpoint.add("optimizer", *optimizer);
  EXPECT_TRUE(checkpoint.load_shared());
  std::vector<std::vector<Tensor>> states(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto state = optimizer->state().find(parameters[i].unsafeGetTensorImpl());
    if (state == optimizer->state().end()) continue;
    states[i] = state_tensors(*optimizer, *state->second);
  }
  return states;
}

TEST(ShardedCheckpoint, HoldStatesAsAnUnshardedOptimizerDoes) {
  const TemporaryFolder folder;
  if (!child_role()) return Launch(2, folder.environment()).expect_success();
  const auto group = make_group();
  const int rank = group->getRank();
  const std::string alone_file = folder / "alone.pt", again_file = folder / "again.pt";
  const std::string sharded_file = folder / "sharded.pt";
  for (const auto& [name, make] : kinds()) {
    SCOPED_TRACE(name);
    Layouts net;
    ShardedMasterWeights masters(net, group,
                                 {.dtype = at::kBFloat16, .find_unused_parameters = true});
    const auto optimizer = make(masters.parameters());
    masters.check_optimizer(*optimizer);
    const auto plain = Layouts(/*transposes=*/false)->parameters();
    const auto alone = make(plain);
    for (int step = 0; step < 2; ++step) {
      optimizer->zero_grad();
      Tensor loss = at::zeros({});
      for (std::size_t i = 1; i < plain.size(); ++i) {
        const Tensor weight = net->parameters()[i].to(at::kFloat);
        loss = loss + (weight * gradient_of(weight) * (rank + 1.)).sum();
        plain[i].mutable_grad() = gradient_of(weight) * 1.5;
      }
      loss.backward();
      optimizer->step();
      masters.copy_to_model();
      alone->step();
    }
    torchamp::TrainingCheckpoint sharded(sharded_file);
    sharded.add("optimizer", *optimizer);
    torchamp::save_together(sharded, group);
    // What is saved is saved once: the next file needs the state of then.
    EXPECT_ERROR(sharded.save({at::zeros({1}, at::kByte)}),
                 "its state is sharded over several processes");
    torchamp::TrainingCheckpoint unsharded(alone_file);
    unsharded.add("optimizer", *alone);
    if (rank == 0) unsharded.save();
    expect_same_everywhere(group, {at::ones({1})});  // process 1 waits for the file

    const auto other = make(masters.parameters());
    torchamp::TrainingCheckpoint from_alone(alone_file), again(again_file);
    from_alone.add("optimizer", *other);
    again.add("optimizer", *other);
    EXPECT_TRUE(from_alone.load_shared());
    torchamp::save_together(again, group);
    if (rank != 0) continue;
    const auto expected = states_in(alone_file, make), whole = states_in(sharded_file, make);
    const auto joined = states_in(again_file, make);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(expected[i].empty(), i == 0);
      ASSERT_EQ(whole[i].size(), expected[i].size());
      if (i == 0) {  // if there is a state, it is an initial state
        for (const Tensor& tensor : joined[i]) EXPECT_FALSE(tensor.any().item<bool>());
        continue;
      }
      ASSERT_EQ(joined[i].size(), expected[i].size());
      for (std::size_t t = 0; t < expected[i].size(); ++t) {
        expect_close(whole[i][t], expected[i][t]);
        EXPECT_EQ(joined[i][t].sizes(), expected[i][t].sizes());
        EXPECT_TRUE(at::equal(joined[i][t], expected[i][t]));
      }
    }
  }
}

TEST(ShardedCheckpoint, BringWholeStatesToTheHostAlone) {
  SKIP_WITHOUT(at::kPrivateUse1);
  if (ran_in_processes(1)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  auto net = to_device(torch::nn::Linear(5, 3), simulated::sim0);
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  const auto optimizer = maker_of("FusedAdamW")(masters.parameters());
  net->forward(at::ones({2, 5}, net->weight.options())).sum().backward();
  optimizer->step();
  const TemporaryFolder folder;
  torchamp::TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("optimizer", *optimizer);
  const std::size_t before = simulated::bytes_in_use(0);
  const Tensor part = checkpoint.local_part();  // gathers them
  EXPECT_EQ(simulated::bytes_in_use(0), before);
  checkpoint.save({part});
  EXPECT_EQ(simulated::bytes_in_use(0), before);
}

/// While it lives, LibTorch computes with so many threads. A layer norm's gradients depend on them.
class Threads {
 public:
  explicit Threads(int count) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_ = at::get_num_threads();
};

class ShardedCheckpointOfThreads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Counts, ShardedCheckpointOfThreads, testing::Values(1, 2, 3, 16));

TEST_P(ShardedCheckpointOfThreads, GoesOnOnAnyNumberOfProcessesFromOneFile) {
  const TemporaryFolder folder;
  const Threads threads(GetParam());  // as many in each process, and in the unsharded run
  if (!child_role()) {
    for (const auto& [stage, processes] : {std::pair{"write", 4}, {"hand on", 3}, {"go on", 2}}) {
      auto environment = folder.environment();
      environment["TORCHAMP_TEST_STAGE"] = stage;
      Launch(processes, environment).expect_success();
    }
    // An unsharded run reads it, too.
    for (const std::string name : {"FusedAdamW", "RMSprop"}) {
      Net net = make_net(5);
      MasterWeights masters(net, {.dtype = at::kBFloat16});
      const auto optimizer = maker_of(name)(masters.parameters());
      torchamp::GradScaler scaler;
      std::int64_t step = 0;
      torchamp::TrainingCheckpoint checkpoint(folder / (name + ".pt"));
      checkpoint.add("model", masters).add("optimizer", *optimizer).add("scaler", scaler);
      checkpoint.add("step", step);
      ASSERT_TRUE(checkpoint.load_shared());
      while (step < 5) ShardedRun::train_one_step(net, masters, *optimizer, scaler, step);
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
  for (const std::string name : {"FusedAdamW", "RMSprop"}) {
    const Make make_optimizer = maker_of(name);
    SCOPED_TRACE(name);
    const MasterStorage storage = name == "FusedAdamW" ? MasterStorage::split : MasterStorage::full;
    ShardedRun run(group, storage, make_optimizer, folder / (name + ".pt"));
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
    EXPECT_ERROR((void)torchamp::load_together(run.checkpoint, group), "Resume with as many");
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

TEST(ShardedCheckpoint, AreUnchangedAfterAFileThatDoesNotFit) {
  const TemporaryFolder folder;
  if (!child_role()) return Launch(2, folder.environment()).expect_success();
  const auto group = make_group();
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    ShardedRun sgd(group, storage, maker_of("FusedSGD"), folder / "run.pt");
    sgd.train(2);
    torchamp::save_together(sgd.checkpoint, group);
    ShardedRun adam(group, storage, maker_of("FusedAdamW"), folder / "run.pt");
    adam.train(1);
    std::vector<Tensor> before = adam.net->parameters();
    for (Tensor& parameter : before) parameter = parameter.detach().clone();
    EXPECT_ERROR((void)torchamp::load_together(adam.checkpoint, group), "'optimizer' in");
    EXPECT_EQ(adam.step, 1);
    const auto after = adam.net->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
    adam.train(3);
    ShardedRun other(group, storage, maker_of("FusedAdamW"), folder / "other.pt");
    other.train(3);
    expect_same_bits(*adam.net, *other.net);
  }
}

TEST(ShardedCheckpoint, GiveAnErrorWhenAnotherProcessDiesOrStallsAndTheFileIsWhole) {
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
  ShardedRun run(group, MasterStorage::full, maker_of("FusedAdamW"), folder / "run.pt");
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
