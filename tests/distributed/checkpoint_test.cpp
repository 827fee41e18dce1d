// SPDX-License-Identifier: BSD-3-Clause
// Checkpoints of several processes, of which one may die at any time.
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "torchamp/autocast.h"
#include "torchamp/distributed/checkpoint.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/recompute.h"

namespace {

using at::Tensor;
using torchamp::DistributedDataParallel;
using torchamp::ProcessGroupPtr;

/// Everything at once: guard, scaler, masters, recomputation, fused optimizer, accumulation.
struct Training {
  Training(const ProcessGroupPtr& group, const std::filesystem::path& file) : checkpoint(file) {
    torchamp::broadcast_module(*net, group);
    masters.emplace(net, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
    parallel.emplace(net, group);
    optimizer.emplace(masters->parameters(), torch::optim::AdamWOptions(0.05));
    checkpoint.add("model", *masters).add("optimizer", *optimizer).add("scaler", scaler);
    checkpoint.add("step", step).add_local("losses", losses);
    at::manual_seed(100 + static_cast<std::uint64_t>(group->getRank()));
  }

  void train(std::int64_t until) {
    for (; step < until; ++step) {
      optimizer->zero_grad();
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        const auto no_sync = parallel->no_sync(micro_batch == 0);
        Tensor loss;
        {
          const torchamp::AutocastGuard autocast(at::kCPU);
          loss = parallel->forward(at::randn({6, 4})).to(at::kFloat).pow(2).mean();
        }
        losses += loss.item<double>();
        scaler.scale(loss).backward();
      }
      masters->take_gradients();
      scaler.step(*optimizer);
      scaler.update();
      masters->copy_to_model();
    }
  }

  std::vector<Tensor> state() {
    std::vector<Tensor> tensors = masters->parameters();
    for (const Tensor& buffer : net->buffers()) tensors.push_back(buffer);
    return tensors;
  }

  struct NetImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      return head->forward(torchamp::checkpoint(body, torchamp::checkpoint(first, x)));
    }
    torch::nn::Linear first{register_module("first", torch::nn::Linear(4, 8))};
    torch::nn::Sequential body{register_module(
        "body", torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8),
                                      torch::nn::Dropout(0.5)))};
    torch::nn::Linear head{register_module("head", torch::nn::Linear(8, 2))};
  };

  std::shared_ptr<NetImpl> net = (at::manual_seed(1), std::make_shared<NetImpl>());
  std::optional<torchamp::MasterWeights> masters;
  std::optional<DistributedDataParallel<std::shared_ptr<NetImpl> > > parallel;
  std::optional<torchamp::FusedAdamW> optimizer;
  torchamp::GradScaler scaler{{.init_scale = 64., .growth_interval = 3}};
  std::int64_t step = 0;
  double losses = 0.;
  torchamp::TrainingCheckpoint checkpoint;
};

TEST(Distributed, GoesOnBitForBitFromACheckpoint) {
  const TemporaryFolder folder;
  if (!child_role()) {
    for (const auto& [stage, processes] :
         {std::pair{"straight", 2}, {"first half", 2}, {"second half", 2}, {"alone", 1}}) {
      auto environment = folder.environment();
      environment["TORCHAMP_TEST_STAGE"] = stage;
      Launch(processes, environment).expect_success();
    }
    return;
  }
  const std::string stage = std::getenv("TORCHAMP_TEST_STAGE");
  const auto group = make_group();
  const std::string result = folder / std::to_string(group->getRank());
  Training run(group, folder / "run.pt");
  if (stage == "straight") {
    run.train(6);
    torch::save(run.state(), result);
  } else if (stage == "first half") {
    EXPECT_FALSE(torchamp::load_together(run.checkpoint, group));
    run.train(3);
    torchamp::save_together(run.checkpoint, group);
    run.train(4);  // comes to nothing
  } else if (stage == "second half") {
    EXPECT_TRUE(torchamp::load_together(run.checkpoint, group));
    EXPECT_EQ(run.step, 3);
    run.train(6);
    std::vector<Tensor> expected;
    torch::load(expected, result);
    const auto state = run.state();
    for (std::size_t i = 0; i < state.size(); ++i) EXPECT_TRUE(at::equal(state[i], expected[i]));
  } else {
    EXPECT_ERROR((void)torchamp::load_together(run.checkpoint, group),
                 "was saved by 2 process(es), and this run has 1");
    EXPECT_TRUE(run.checkpoint.load_shared());
    run.train(4);
  }
}

/// Runs two processes of which the second is to end with `status`, or to be killed by this one.
void expect_survivor(const TemporaryFolder& folder, std::optional<int> status) {
  Launch launch(2, folder.environment());
  if (status) {
    EXPECT_EQ(launch.rank(1).wait(), *status);
  }
  EXPECT_EQ(launch.rank(0).wait(), 0) << "the survivor";
}

/// Has the second of two processes `fail` once both have saved. Expects the first to get errors,
/// and to load what was saved.
void fail_after_a_checkpoint(const TemporaryFolder& folder, const ProcessGroupPtr& group,
                             const std::function<void(Training&)>& fail) {
  Training run(group, folder / "run.pt");
  run.train(2);
  torchamp::save_together(run.checkpoint, group);
  if (group->getRank() == 1) fail(run);
  EXPECT_THROW(run.train(4), std::exception);
  EXPECT_ERROR(torchamp::save_together(run.checkpoint, group), "save_together: ");
  EXPECT_TRUE(run.checkpoint.load(0, 2));
  EXPECT_EQ(run.step, 2);
}

TEST(Distributed, GivesAnErrorWhenAnotherProcessDies) {
  const TemporaryFolder folder;
  if (!child_role()) return expect_survivor(folder, -SIGKILL);
  fail_after_a_checkpoint(folder, make_group(), [](Training& run) {
    const torchamp::AutocastGuard autocast(at::kCPU);
    run.parallel->forward(at::randn({6, 4}));
    raise(SIGKILL);
  });
}

TEST(Distributed, NamesTheCallWhenAnotherProcessHasDied) {
  const TemporaryFolder folder;
  if (!child_role()) return expect_survivor(folder, -SIGKILL);
  const auto group = make_group();
  torch::nn::Linear model(4, 2);
  at::Tensor flag = at::zeros({});
  torchamp::found_inf_agreement(group)(flag);
  if (group->getRank() == 1) raise(SIGKILL);
  EXPECT_ERROR(DistributedDataParallel(model, group), "DistributedDataParallel: ");
  EXPECT_ERROR(torchamp::broadcast_module(*model, group), "broadcast_module: ");
  EXPECT_ERROR(torchamp::found_inf_agreement(group)(flag), "found_inf_agreement: ");
}

TEST(Distributed, GivesAnErrorWhenAnotherProcessStalls) {
  const TemporaryFolder folder;
  if (!child_role()) return expect_survivor(folder, std::nullopt);
  fail_after_a_checkpoint(folder, make_group(std::chrono::seconds(3)), [](Training&) {
    raise(SIGSTOP);  // until this test's end kills it
  });
}

TEST(Distributed, LeavesTheOldCheckpointWhenTheWriterIsKilled) {
  const TemporaryFolder folder;
  if (!child_role()) {
    Launch launch(2, folder.environment());
    EXPECT_EQ(launch.rank(0).wait(), -SIGXFSZ);
    EXPECT_EQ(launch.rank(1).wait(), 0) << "the survivor";
    return;
  }
  const auto group = make_group();
  Training run(group, folder / "run.pt");
  torchamp::save_together(run.checkpoint, group);
  run.train(1);
  if (group->getRank() == 0) {
    const rlimit no_core{0, 0}, limit{1000, 1000};
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  EXPECT_THROW(torchamp::save_together(run.checkpoint, group), std::exception);
  EXPECT_TRUE(run.checkpoint.load(1, 2));
  EXPECT_EQ(run.step, 0);
}

TEST(Distributed, SavesForAllOrNone) {
  const TemporaryFolder folder;
  if (!child_role()) return Launch(2, folder.environment()).expect_success();
  const auto group = make_group();
  struct Fails {
    void save(torch::serialize::OutputArchive&) const { TORCH_CHECK(!now, "cannot be saved"); }
    void load(torch::serialize::InputArchive&) {}
    bool now = false;
  } fails;
  int step = 1;
  torchamp::TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add_local("fails", fails);
  torchamp::save_together(checkpoint, group);
  step = 2;
  fails.now = group->getRank() == 1;
  EXPECT_ERROR(torchamp::save_together(checkpoint, group),
               fails.now ? "cannot be saved" : "save_together: process 1 has failed");
  fails.now = false;
  EXPECT_TRUE(torchamp::load_together(checkpoint, group));
  EXPECT_EQ(step, 1);

  const bool other = group->getRank() == 1;
  torchamp::TrainingCheckpoint elsewhere(folder / (other ? "elsewhere.pt" : "run.pt"));
  elsewhere.add("step", step).add_local("fails", fails);
  EXPECT_ERROR((void)torchamp::load_together(elsewhere, group), "Put it where all can read it");
  if (other) elsewhere.save({elsewhere.local_part(), elsewhere.local_part()});
  EXPECT_ERROR((void)torchamp::load_together(elsewhere, group),
               "is another file on some processes");
}

}  // namespace

#endif
