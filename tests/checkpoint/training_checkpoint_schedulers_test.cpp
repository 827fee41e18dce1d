// SPDX-License-Identifier: BSD-3-Clause
// Learning rate schedulers in a TrainingCheckpoint.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/linux_only.h"
#include "support/temporary_folder.h"
#include "torchamp/training_checkpoint.h"

#ifdef __linux__
#include "support/processes.h"
#endif

namespace {

namespace fs = std::filesystem;
using at::Tensor;
using torchamp::TrainingCheckpoint;

/// Halves the learning rates, each time after twice as many steps.
struct RarerAndRarer : torch::optim::LRScheduler {
  using LRScheduler::LRScheduler;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("steps", c10::IValue(static_cast<std::int64_t>(step_count_)));
    archive.write("next", c10::IValue(next));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue steps, saved;
    archive.read("steps", steps);
    archive.read("next", saved);
    step_count_ = static_cast<unsigned>(steps.toInt());
    next = saved.toInt();
  }
  std::vector<double> get_lrs() override {
    std::vector<double> rates = get_current_lrs();
    if (step_count_ != next) return rates;
    next *= 2;
    for (double& rate : rates) rate /= 2;
    return rates;
  }
  std::int64_t next = 1;
};

/// A run whose two groups have different learning rates.
struct ScheduledRun {
  ScheduledRun(const fs::path& file, const std::string& kind) : checkpoint(file) {
    auto& groups = optimizer.param_groups();
    groups[0].options().set_lr(0.3);
    checkpoint.add("model", net).add("optimizer", optimizer).add("step", step);
    if (kind == "own") {
      auto own = std::make_unique<RarerAndRarer>(optimizer);
      checkpoint.add("schedule", *own);
      schedule = std::move(own);
    } else if (kind == "LibTorch's") {
      auto libtorchs = std::make_unique<torch::optim::StepLR>(optimizer, 3, 0.7);
      checkpoint.add("schedule", *libtorchs);
      schedule = std::move(libtorchs);
    } else {
      schedule = std::make_unique<torch::optim::StepLR>(optimizer, 3, 0.7);
      checkpoint.add("schedule", *schedule);
    }
  }

  void train(std::int64_t until) {
    for (; step < until; ++step) {
      optimizer.zero_grad();
      net->forward(at::randn({6, 4})).pow(2).mean().backward();
      optimizer.step();
      schedule->step();
    }
  }

  /// The weights, and the learning rates, which follow from all that were before.
  std::vector<Tensor> state() {
    std::vector<Tensor> tensors = net->parameters();
    for (const auto& group : optimizer.param_groups()) {
      tensors.push_back(at::scalar_tensor(group.options().get_lr(), at::kDouble));
    }
    return tensors;
  }

  torch::nn::Linear net = (at::manual_seed(3), torch::nn::Linear(4, 2));
  torch::optim::SGD optimizer{
      std::vector<torch::optim::OptimizerParamGroup>{{{net->weight}}, {{net->bias}}},
      torch::optim::SGDOptions(0.2).momentum(0.9)};
  std::unique_ptr<torch::optim::LRScheduler> schedule;
  std::int64_t step = 0;
  TrainingCheckpoint checkpoint;
};

TEST(TrainingCheckpoint, GoesOnWithItsLearningRateSchedulerAfterAKill) {
#ifdef __linux__
  const TemporaryFolder folder;
  const auto role = child_role();
  for (const std::string kind : {"own", "LibTorch's", "by its base"}) {
    if (role && *role != kind) continue;
    SCOPED_TRACE(kind);
    ScheduledRun run(folder / (kind + ".pt"), kind);
    if (role) {
      EXPECT_FALSE(run.checkpoint.load());
      run.train(5);
      run.checkpoint.save();
      run.train(6);  // comes to nothing
      raise(SIGKILL);
    }
    ScheduledRun straight(folder / "straight.pt", kind);
    straight.train(13);
    EXPECT_EQ(ChildProcess(kind, folder.environment()).wait(), -SIGKILL);
    EXPECT_TRUE(run.checkpoint.load());
    EXPECT_EQ(run.step, 5);
    run.train(13);
    const auto a = straight.state(), b = run.state();
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
#else
  SKIP_WITHOUT_LINUX();
#endif
}

TEST(TrainingCheckpoint, RefusesASchedulerOfWhichItSeesOnlyTheBase) {
  struct Derived : torch::optim::StepLR {
    using StepLR::StepLR;
  };
  torch::nn::Linear net(4, 2);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  RarerAndRarer own(optimizer);
  Derived derived(optimizer, 3);
  TrainingCheckpoint checkpoint("never written");
  EXPECT_ERROR(checkpoint.add("schedule", static_cast<torch::optim::LRScheduler&>(own)),
               "TrainingCheckpoint::add: 'schedule' is a (anonymous namespace)::RarerAndRarer, but "
               "of an LRScheduler& only LibTorch's StepLR can be saved. Give it");
  EXPECT_ERROR(checkpoint.add("schedule", static_cast<torch::optim::StepLR&>(derived)),
               "Derived, but of an LRScheduler& only");
  EXPECT_NO_THROW(checkpoint.add("schedule", own));
}

TEST(TrainingCheckpoint, RefusesASchedulerWithoutItsOptimizer) {
  const TemporaryFolder folder;
  torch::nn::Linear net(4, 2);
  torch::optim::SGD optimizer(net->parameters(), 0.1), other(net->parameters(), 0.2);
  torch::optim::StepLR schedule(optimizer, 1);
  const std::string error =
      ": 'schedule' sets the learning rates of an optimizer that is not in the checkpoint, so a "
      "resumed run would have other rates. Add the optimizer, too.";
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("schedule", schedule).add("other", other);
  EXPECT_ERROR(checkpoint.save(), "TrainingCheckpoint::save" + error);
  EXPECT_FALSE(checkpoint.exists());
  checkpoint.add_local("optimizer", optimizer);
  schedule.step();
  checkpoint.save();
  schedule.step();
  TrainingCheckpoint without(folder / "run.pt");
  without.add("schedule", schedule);
  EXPECT_ERROR((void)without.load(), "TrainingCheckpoint::load" + error);
  TrainingCheckpoint scheduled_by_base(folder / "run.pt");
  torch::optim::LRScheduler& base = schedule;
  scheduled_by_base.add_local("schedule", base);
  EXPECT_ERROR((void)scheduled_by_base.load_shared(), "TrainingCheckpoint::load" + error);
  EXPECT_TRUE(checkpoint.load());

  // Who knows what the program's own objects save?
  struct Own {
    torch::optim::Optimizer& held;
    void save(torch::serialize::OutputArchive& archive) const { held.save(archive); }
    void load(torch::serialize::InputArchive& archive) { held.load(archive); }
  } own{optimizer};
  TrainingCheckpoint of_own(folder / "own.pt");
  of_own.add("schedule", schedule).add("own", own);
  EXPECT_NO_THROW(of_own.save());
}

TEST(TrainingCheckpoint, LeavesTheSchedulerUnchangedIfTheFileDoesNotFit) {
  const TemporaryFolder folder;
  ScheduledRun run(folder / "run.pt", "LibTorch's");
  run.train(4);
  run.checkpoint.save();
  run.train(5);
  const auto before = run.state();
  std::string missing;
  run.checkpoint.add("missing", missing);
  EXPECT_ERROR((void)run.checkpoint.load(), "holds no 'missing'");
  run.schedule->step();  // the rates fall with the next one
  EXPECT_EQ(run.state()[2].item<double>(), before[2].item<double>());
  run.schedule->step();
  EXPECT_LT(run.state()[2].item<double>(), before[2].item<double>());
}

}  // namespace
