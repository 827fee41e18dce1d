// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/training_checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <filesystem>
#include <fstream>

#include "support/disk_calls.h"
#include "support/expect_error.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "torchamp/autocast.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"

namespace {

namespace fs = std::filesystem;
using at::Tensor;
using torchamp::TrainingCheckpoint;

/// A run with everything that has a state: dropout, batch norm, a fused optimizer, a scaler,
/// masters.
template <class Optimizer, class Options>
struct Run {
  explicit Run(const fs::path& file, bool half) : checkpoint(file) {
    if (half) {
      masters.emplace(net, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
      optimizer = std::make_unique<Optimizer>(masters->parameters(), Options(0.05));
      checkpoint.add("model", *masters);
    } else {
      optimizer = std::make_unique<Optimizer>(net->parameters(), Options(0.05));
      checkpoint.add("model", net);
    }
    checkpoint.add("optimizer", *optimizer).add("scaler", scaler).add("step", step);
    checkpoint.add_local("losses", losses);
  }

  void train(std::int64_t until) {
    for (; step < until; ++step) {
      optimizer->zero_grad();
      Tensor loss;
      {
        const torchamp::AutocastGuard autocast(at::kCPU);
        loss = net->forward(at::randn({6, 4})).to(at::kFloat).pow(2).mean();
      }
      losses += loss.item<double>();
      scaler.scale(loss).backward();
      if (masters) masters->take_gradients();
      scaler.step(*optimizer);
      scaler.update();
      if (masters) masters->copy_to_model();
    }
  }

  std::vector<Tensor> state() {
    std::vector<Tensor> tensors = net->parameters();
    for (const Tensor& buffer : net->buffers()) tensors.push_back(buffer);
    if (masters) {
      for (const Tensor& master : masters->parameters()) tensors.push_back(master);
    }
    tensors.push_back(at::tensor({scaler.get_scale(), losses}));
    return tensors;
  }

  torch::nn::Sequential net{torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8),
                            torch::nn::Dropout(0.5), torch::nn::Linear(8, 2)};
  std::optional<torchamp::MasterWeights> masters;
  std::unique_ptr<Optimizer> optimizer;
  torchamp::GradScaler scaler{{.init_scale = 64., .growth_interval = 3}};
  std::int64_t step = 0;
  double losses = 0.;
  TrainingCheckpoint checkpoint;
};

template <class Optimizer, class Options>
void expect_to_go_on_bit_for_bit(bool half) {
  const TemporaryFolder folder;
  using ThisRun = Run<Optimizer, Options>;
  at::manual_seed(11);
  ThisRun straight(folder / "straight.pt", half);
  straight.train(8);

  at::manual_seed(11);
  {
    ThisRun first(folder / "run.pt", half);
    EXPECT_FALSE(first.checkpoint.load());
    first.train(4);
    first.checkpoint.save();
    first.train(6);  // comes to nothing
  }
  at::manual_seed(99);
  ThisRun second(folder / "run.pt", half);
  second.train(2);
  EXPECT_TRUE(second.checkpoint.load());
  EXPECT_EQ(second.step, 4);
  second.train(8);
  const auto a = straight.state(), b = second.state();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(TrainingCheckpoint, GoesOnBitForBit) {
  expect_to_go_on_bit_for_bit<torch::optim::Adam, torch::optim::AdamOptions>(false);
  expect_to_go_on_bit_for_bit<torchamp::FusedAdamW, torch::optim::AdamWOptions>(false);
  expect_to_go_on_bit_for_bit<torchamp::FusedAdamW, torch::optim::AdamWOptions>(true);
}

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

/// A run whose two groups have learning rates of their own.
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
               "TrainingCheckpoint::add: 'schedule' is a (anonymous namespace)::RarerAndRarer, and "
               "of an LRScheduler& only LibTorch's StepLR is known whole. Give it");
  EXPECT_ERROR(checkpoint.add("schedule", static_cast<torch::optim::StepLR&>(derived)),
               "Derived, and of an LRScheduler& only");
  EXPECT_NO_THROW(checkpoint.add("schedule", own));
}

TEST(TrainingCheckpoint, RefusesASchedulerWithoutItsOptimizer) {
  const TemporaryFolder folder;
  torch::nn::Linear net(4, 2);
  torch::optim::SGD optimizer(net->parameters(), 0.1), other(net->parameters(), 0.2);
  torch::optim::StepLR schedule(optimizer, 1);
  const std::string error =
      ": 'schedule' sets the learning rates of an optimizer that is not in the checkpoint, without "
      "which a run goes on at other rates. Add the optimizer, too.";
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
  EXPECT_ERROR(without.load(), "TrainingCheckpoint::load" + error);
  TrainingCheckpoint scheduled_by_base(folder / "run.pt");
  torch::optim::LRScheduler& base = schedule;
  scheduled_by_base.add_local("schedule", base);
  EXPECT_ERROR(scheduled_by_base.load_shared(), "TrainingCheckpoint::load" + error);
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

TEST(TrainingCheckpoint, LeavesTheSchedulerAsItWasWhereTheFileDoesNotFit) {
  const TemporaryFolder folder;
  ScheduledRun run(folder / "run.pt", "LibTorch's");
  run.train(4);
  run.checkpoint.save();
  run.train(5);
  const auto before = run.state();
  std::string missing;
  run.checkpoint.add("missing", missing);
  EXPECT_ERROR(run.checkpoint.load(), "holds no 'missing'");
  run.schedule->step();  // the rates fall with the next one
  EXPECT_EQ(run.state()[2].item<double>(), before[2].item<double>());
  run.schedule->step();
  EXPECT_LT(run.state()[2].item<double>(), before[2].item<double>());
}

TEST(TrainingCheckpoint, HoldsNumbersStringsAndTensors) {
  const TemporaryFolder folder;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  int whole = 3;
  float real = 0.5f;
  bool flag = true;
  std::string text = "a\nb";
  Tensor tensor = at::arange(3);
  checkpoint.add("class", whole).add("real", real).add("flag", flag).add("text", text);
  checkpoint.add_local("tensor", tensor);
  checkpoint.save();
  whole = 0, real = 0.f, flag = false, text = "", tensor.fill_(9);
  EXPECT_TRUE(checkpoint.load());
  EXPECT_EQ(whole, 3);
  EXPECT_EQ(real, 0.5f);
  EXPECT_TRUE(flag);
  EXPECT_EQ(text, "a\nb");
  EXPECT_TRUE(at::equal(tensor, at::arange(3)));
  EXPECT_ERROR(checkpoint.add("flag", whole), "there is a 'flag' already");
  EXPECT_ERROR(checkpoint.add_local("flag", whole), "there is a 'flag' already");
}

TEST(TrainingCheckpoint, LeavesEverythingAsItWasWhereTheFileDoesNotFit) {
  const TemporaryFolder folder;
  const auto save = [&](std::int64_t width, at::ScalarType dtype) {
    torch::nn::Linear net(4, width);
    net->to(dtype);
    torch::optim::Adam optimizer(net->parameters());
    std::int64_t step = 7;
    TrainingCheckpoint(folder / "run.pt")
        .add("step", step)
        .add("model", net)
        .add("optimizer", optimizer)
        .save();
  };
  torch::nn::Linear net(4, 2);
  torch::optim::Adam optimizer(net->parameters());
  net->forward(at::ones({1, 4})).sum().backward();
  optimizer.step();
  const Tensor weight = net->weight.detach().clone();
  std::int64_t step = 1;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add("model", net).add("optimizer", optimizer);
  at::manual_seed(1);
  const auto expect_refused = [&](const std::string& text) {
    EXPECT_ERROR(checkpoint.load(), text);
    EXPECT_EQ(step, 1);
    EXPECT_TRUE(at::equal(net->weight, weight));
    EXPECT_EQ(optimizer.state().size(), 2u);
  };
  save(3, at::kFloat);
  expect_refused(
      "'model' in '" + (folder / "run.pt").string() +
      "' does not fit: 'weight' is float [3, 4] in the file and float [2, 4] in the model");
  save(2, at::kHalf);
  expect_refused("'weight' is c10::Half [2, 4] in the file and float [2, 4] in the model");
  torch::save(net, (folder / "run.pt").string());
  expect_refused("was not written by TrainingCheckpoint::save");
  std::ofstream(folder / "run.pt") << "nonsense";
  expect_refused("it is damaged: it is no zip file, or is cut off");
  save(2, at::kFloat);
  TrainingCheckpoint more(folder / "run.pt");
  more.add("other", step);
  EXPECT_ERROR(more.load(), "holds no 'other'. Add what was added when it was saved.");
  EXPECT_ERROR(checkpoint.load(0, 2), "was saved by 1 process(es), and this run has 2");
  EXPECT_TRUE(checkpoint.load_shared());
  EXPECT_EQ(step, 7);
}

TEST(TrainingCheckpoint, SeesAFileThatIsCutShortOrChanged) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  Tensor tensor = at::zeros({1000});
  TrainingCheckpoint checkpoint(path);
  checkpoint.add("tensor", tensor);
  checkpoint.save();
  const auto size = fs::file_size(path);
  std::string whole(size, '\0');
  std::ifstream(path, std::ios::binary).read(whole.data(), static_cast<std::streamsize>(size));
  for (const std::size_t part : {size / 4, size / 2, size - 1}) {
    std::ofstream(path, std::ios::binary) << whole.substr(0, part);
    EXPECT_ERROR(checkpoint.load(), "is damaged");
  }
}

TEST(TrainingCheckpoint, FollowsALinkAndHasTheRightsOfOtherNewFiles) {
  const TemporaryFolder folder;
  int step = 1;
  fs::create_symlink(folder / "real.pt", folder / "link.pt");
  TrainingCheckpoint checkpoint(folder / "link.pt");
  checkpoint.add("step", step);
  checkpoint.save();
  checkpoint.save();
  EXPECT_TRUE(fs::is_symlink(folder / "link.pt"));
  EXPECT_TRUE(fs::is_regular_file(folder / "real.pt"));
  std::ofstream(folder / "other") << "x";
  EXPECT_EQ(fs::status(folder / "real.pt").permissions(),
            fs::status(folder / "other").permissions());
  EXPECT_ERROR(TrainingCheckpoint(folder / "none/run.pt").save(), "No such file or directory");
}

/// A checkpoint whose file holds a step and a tensor full of it.
struct Numbered {
  explicit Numbered(const fs::path& path) : checkpoint(path) {
    checkpoint.add("step", step).add("tensor", tensor);
  }
  void save(std::int64_t number) {
    step = number;
    tensor = at::full({20000}, static_cast<double>(number), at::kDouble);
    checkpoint.save();
  }
  /// The step, after a look at whether the file is whole.
  std::int64_t load() {
    EXPECT_TRUE(checkpoint.load());
    EXPECT_TRUE(at::equal(tensor, at::full({20000}, static_cast<double>(step), at::kDouble)));
    return step;
  }
  std::int64_t step = 0;
  Tensor tensor = at::zeros({20000}, at::kDouble);
  TrainingCheckpoint checkpoint;
};

// The kernel kills a process that writes beyond its limit of file size, at that very byte.
TEST(TrainingCheckpoint, LeavesTheOldFileWholeWhereverItsWritingIsKilled) {
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (const auto role = child_role()) {
    const rlimit no_core{0, 0}, limit{std::stoul(*role), std::stoul(*role)};
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_FSIZE, &limit);
    numbered.save(2);
    return;
  }
  numbered.save(1);
  const auto size = static_cast<double>(fs::file_size(folder / "run.pt"));
  for (const double part : {0., 0.01, 0.5, 0.999}) {
    const auto bytes = static_cast<std::size_t>(size * part);
    EXPECT_EQ(ChildProcess(std::to_string(bytes), folder.environment()).wait(), -SIGXFSZ);
    EXPECT_EQ(numbered.load(), 1);
    EXPECT_EQ(folder.files(), 2) << "the file and what the killed process has left";
    numbered.save(1);
    EXPECT_EQ(folder.files(), 1);
  }
  EXPECT_EQ(
      ChildProcess(std::to_string(fs::file_size(folder / "run.pt")), folder.environment()).wait(),
      0);
  EXPECT_EQ(numbered.load(), 2);
}

TEST(TrainingCheckpoint, IsTheOldFileUntilItsNameIsTheNewOnes) {
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (const auto role = child_role()) {
    DiskCalls::killed_at = *role;
    numbered.save(2);
    return;
  }
  for (const auto& [point, found] : {std::pair{"before fsync 1", 1},
                                     {"after fsync 1", 1},
                                     {"before rename 1", 1},
                                     {"after rename 1", 2},
                                     {"before fsync 2", 2},
                                     {"after fsync 2", 2}}) {
    numbered.save(1);
    EXPECT_EQ(ChildProcess(point, folder.environment()).wait(), -SIGKILL) << point;
    EXPECT_EQ(numbered.load(), found) << point;
  }
  numbered.save(3);
  EXPECT_EQ(folder.files(), 1);
}

TEST(TrainingCheckpoint, IsWholeWheneverTheProcessIsKilled) {
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (child_role()) {
    for (std::int64_t number = numbered.load() + 1;; ++number) numbered.save(number);
  }
  numbered.save(0);
  std::int64_t latest = 0;
  for (int kill = 0; kill < 6; ++kill) {
    ChildProcess writer("writer", folder.environment());
    const auto started = fs::last_write_time(folder / "run.pt");
    for (int tries = 0; fs::last_write_time(folder / "run.pt") == started && tries < 12000;
         ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(1700 * kill));
    writer.kill();
    EXPECT_EQ(writer.wait(), -SIGKILL);
    const std::int64_t step = numbered.load();
    EXPECT_GT(step, latest);
    latest = step;
  }
}

TEST(TrainingCheckpoint, LeavesTheOldFileAndNothingElseOnAFullDisk) {
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (child_role()) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{5000, 5000};
    setrlimit(RLIMIT_FSIZE, &limit);
    EXPECT_ERROR(numbered.save(2), "TrainingCheckpoint::save: cannot write");
    return;
  }
  numbered.save(1);
  EXPECT_EQ(ChildProcess("writer", folder.environment()).wait(), 0);
  EXPECT_EQ(numbered.load(), 1);
  EXPECT_EQ(folder.files(), 1);
}

}  // namespace
