// SPDX-License-Identifier: BSD-3-Clause
// Checkpoints of a TrainingStep and of further objects: weight averages, the position in an epoch,
// TorchScript modules.
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/linux_only.h"
#include "support/temporary_folder.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/training_step.h"

#ifdef __linux__
#include "support/processes.h"
#endif

namespace {

using at::Tensor;
using torchamp::TrainingCheckpoint;
using torchamp::TrainingStep;

/// A training with a weight average, whose batches come from a permutation of the data for each
/// epoch.
struct Training {
  explicit Training(const std::string& path, std::int64_t micro_batches = 1)
      : train(net, optimizer,
              {.dtype = at::kBFloat16,
               .max_grad_norm = 1.,
               .micro_batches = micro_batches,
               .scheduler = scheduler}),
        checkpoint(path) {
    for (const Tensor& parameter : net->parameters()) average.push_back(parameter.detach().clone());
    checkpoint.add("train", train).add("average", average).add("epoch", epoch);
    checkpoint.add("order", order).add("position", position);
  }

  void iterate() {
    if (position == 0) order = torch::randperm(data.size(0));
    const Tensor rows = order.narrow(0, position, 4);
    train([&] {
      return torch::mse_loss(torch::dropout(net->forward(data.index_select(0, rows)), 0.25, true),
                             target.index_select(0, rows));
    });
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < average.size(); ++i) {
      average[i].lerp_(net->parameters()[i], 0.25);
    }
    position += 4;
    if (position == data.size(0)) position = 0, ++epoch;
  }

  torch::nn::Linear net{8, 2};
  Tensor data = torch::linspace(-1, 1, 24 * 8).view({24, 8}).sin();
  Tensor target = torch::linspace(-2, 2, 24 * 2).view({24, 2});
  torchamp::FusedAdamW optimizer{net->parameters(), torch::optim::AdamWOptions(0.01)};
  torch::optim::StepLR scheduler{optimizer, 3, 0.5};
  TrainingStep train;
  std::vector<Tensor> average;
  Tensor order;  // of the epoch's data
  std::int64_t epoch = 0, position = 0;
  TrainingCheckpoint checkpoint;
};

#ifdef __linux__
void expect_same(const Training& one, const Training& other) {
  EXPECT_EQ(one.epoch, other.epoch);
  EXPECT_EQ(one.position, other.position);
  EXPECT_EQ(one.train.steps(), other.train.steps());
  EXPECT_TRUE(at::equal(one.order, other.order));
  for (std::size_t i = 0; i < one.average.size(); ++i) {
    EXPECT_TRUE(at::equal(one.average[i], other.average[i])) << i;
    EXPECT_TRUE(at::equal(one.net->parameters()[i], other.net->parameters()[i])) << i;
  }
}
#endif

TEST(TrainingCheckpointOfAStep, ResumesInTheMiddleOfAnEpochAfterAKillBitForBit) {
#ifdef __linux__
  const TemporaryFolder folder;
  const auto role = child_role();
  const std::string path = (folder / "run.pt").string();
  torch::manual_seed(3);
  if (role) {
    Training killed(path);
    for (int i = 0; i < 9; ++i) {
      killed.iterate();
      if (i == 7) killed.checkpoint.save();  // the second of six positions of the second epoch
    }
    raise(SIGKILL);
  }
  EXPECT_EQ(ChildProcess("killed", folder.environment()).wait(), -SIGKILL);
  at::set_num_threads(1);
  torch::manual_seed(3);
  Training whole((folder / "other.pt").string());
  for (int i = 0; i < 20; ++i) whole.iterate();
  torch::manual_seed(4);
  Training resumed(path);
  ASSERT_TRUE(resumed.checkpoint.load());
  EXPECT_EQ(resumed.train.steps(), 8);
  EXPECT_EQ(resumed.epoch, 1);
  EXPECT_EQ(resumed.position, 8);
  for (int i = 8; i < 20; ++i) resumed.iterate();
  expect_same(resumed, whole);
#else
  SKIP_WITHOUT_LINUX();
#endif
}

TEST(TrainingCheckpointOfAStep, IsAnErrorWithinAWindowThatLeavesTheFile) {
  const TemporaryFolder folder;
  Training training((folder / "run.pt").string(), /*micro_batches=*/2);
  training.iterate();
  EXPECT_ERROR(training.checkpoint.save(),
               "TrainingCheckpoint::save: 1 of 2 micro-batches are pending");
  EXPECT_EQ(folder.files(), 0);
  training.iterate();
  training.checkpoint.save();
  training.iterate();
  EXPECT_ERROR((void)training.checkpoint.load(),
               "TrainingCheckpoint::load: 1 of 2 micro-batches are pending");
  training.train.finish();
  EXPECT_TRUE(training.checkpoint.load());
}

TEST(TrainingCheckpointOfAStep, HoldsSeveralStepsByTheirNames) {
  const TemporaryFolder folder;
  torch::nn::Linear one(2, 2), other(3, 3);
  torch::optim::SGD of_one(one->parameters(), 0.1), of_other(other->parameters(), 0.1);
  TrainingStep first(one, of_one, {.dtype = at::kFloat});
  TrainingStep second(other, of_other, {.dtype = at::kFloat});
  second([&] { return other->forward(torch::ones({1, 3})).sum(); });
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("generator", first).add("discriminator", second);
  checkpoint.save();
  const Tensor saved = other->weight.detach().clone();
  second([&] { return other->forward(torch::ones({1, 3})).sum(); });
  EXPECT_TRUE(checkpoint.load());
  EXPECT_EQ(first.steps(), 0);
  EXPECT_EQ(second.steps(), 1);
  EXPECT_TRUE(at::equal(other->weight, saved));

  torch::optim::StepLR scheduler(of_one, 1, 0.5);
  TrainingStep scheduled(one, of_one, {.dtype = at::kFloat, .scheduler = scheduler});
  TrainingCheckpoint with_scheduler(folder / "run.pt");
  with_scheduler.add("generator", scheduled).add("discriminator", second);
  EXPECT_ERROR((void)with_scheduler.load(), "holds no 'generator.scheduler'");
  with_scheduler.save();
  EXPECT_ERROR((void)checkpoint.load(), "it was saved with a scheduler");
}

TEST(TrainingCheckpointValues, FillsVectorsOfTensorsInPlace) {
  const TemporaryFolder folder;
  std::vector<Tensor> list{torch::ones({2}), Tensor(), torch::full({1}, 3, at::kLong)};
  const Tensor first = list[0];
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("list", list);
  checkpoint.save();
  list[0].zero_();
  list[1] = torch::ones({1});
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(list[0].is_same(first));
  EXPECT_TRUE(at::equal(first, torch::ones({2})));
  EXPECT_FALSE(list[1].defined());
  EXPECT_EQ(list[2].item<std::int64_t>(), 3);

  std::vector<Tensor> empty;
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("list", empty).load());
  ASSERT_EQ(empty.size(), 3);
  EXPECT_TRUE(at::equal(empty[0], first));
  std::vector<Tensor> shorter{torch::zeros({2})};
  EXPECT_ERROR((void)TrainingCheckpoint(folder / "run.pt").add("list", shorter).load(),
               "it has 3 tensors in the file and 1 in the program");
}

TEST(TrainingCheckpointValues, RestoresAVectorOfTensorsAfterALoadThatFailed) {
  const TemporaryFolder folder;
  std::vector<Tensor> list{torch::ones({2})};
  int number = 7;
  TrainingCheckpoint(folder / "run.pt").add("list", list).add("number", number).save();
  list[0].fill_(5);
  const Tensor first = list[0];
  std::string text = "here";
  TrainingCheckpoint other(folder / "run.pt");
  other.add("list", list).add("number", text);
  EXPECT_ERROR((void)other.load(), "'number'");
  EXPECT_TRUE(list[0].is_same(first));
  EXPECT_TRUE(at::equal(first, torch::full({2}, 5.F)));
  list.clear();
  EXPECT_ERROR((void)other.load(), "'number'");
  EXPECT_TRUE(list.empty());
}

/// A script with a frozen backbone and a head.
torch::jit::Module make_script() {
  torch::jit::Module net("Net"), backbone("Backbone");
  backbone.register_parameter("weight", torch::linspace(-1, 1, 32).view({4, 8}), false);
  backbone.register_buffer("offset", torch::ones({4}));
  backbone.register_attribute("training", c10::BoolType::get(), true);
  backbone.define(
      "def forward(self, x):\n"
      "  y = torch.matmul(x, self.weight.t()) + self.offset\n"
      "  return torch.dropout(torch.relu(y), 0.5, self.training)\n");
  net.register_attribute("training", c10::BoolType::get(), true);
  net.register_module("backbone", backbone);
  net.register_parameter("weight", torch::linspace(1, -1, 8).view({2, 4}), false);
  net.define(
      "def forward(self, x):\n  return torch.matmul(self.backbone.forward(x), self.weight.t())\n");
  for (at::Tensor parameter : net.parameters()) {
    if (parameter.size(0) == 2) parameter.set_requires_grad(true);
  }
  return net;
}

TEST(TrainingStepOfAScript, TrainsItsHeadAndLeavesItsFrozenBackbone) {
  torch::jit::Module script = make_script();
  const Tensor head = script.attr("weight").toTensor();
  const Tensor before = head.detach().clone();
  const Tensor frozen = script.attr("backbone").toModule().attr("weight").toTensor().clone();
  torch::optim::SGD optimizer(std::vector<Tensor>{head}, 1e-3);
  TrainingStep train(script, optimizer, {.dtype = at::kBFloat16});
  const Tensor x = torch::ones({3, 8});
  double first = 0., last = 0.;
  for (int i = 0; i < 20; ++i) {
    const auto result = train([&] { return script.forward({x}).toTensor().square().mean(); });
    (i == 0 ? first : last) = result.loss();
  }
  EXPECT_LT(last, first);
  EXPECT_FALSE(at::equal(head, before));
  EXPECT_TRUE(at::equal(script.attr("backbone").toModule().attr("weight").toTensor(), frozen));
}

TEST(TrainingStepOfAScript, EvaluatesInEvaluationMode) {
  torch::jit::Module script = make_script();
  torch::optim::SGD optimizer(std::vector<Tensor>{script.attr("weight").toTensor()}, 0.1);
  TrainingStep train(script, optimizer, {.dtype = at::kFloat});
  const Tensor x = torch::ones({3, 8});
  script.attr("backbone").toModule().eval();
  train.evaluate([&] { EXPECT_FALSE(script.is_training()); });
  EXPECT_TRUE(script.is_training());
  EXPECT_FALSE(script.attr("backbone").toModule().is_training());
  script.train();
  const auto answer = [&] { return script.forward({x}).toTensor(); };
  EXPECT_TRUE(at::equal(train.evaluate(answer), train.evaluate(answer))) << "no dropout";
  EXPECT_TRUE(script.attr("backbone").toModule().is_training());
}

TEST(TrainingStepOfAScript, GivesItsParametersToAFactory) {
  torch::jit::Module script = make_script();
  std::vector<std::string> names;
  TrainingStep train(script,
                     [&](const TrainingStep::NamedParameters& named) {
                       std::vector<Tensor> trained;
                       for (const auto& [name, parameter] : named) {
                         names.push_back(name);
                         if (parameter.requires_grad()) trained.push_back(parameter);
                       }
                       return std::make_unique<torch::optim::SGD>(trained, 0.1);
                     },
                     {.dtype = at::kFloat});
  EXPECT_EQ(names, (std::vector<std::string>{"weight", "backbone.weight"}));
}

TEST(TrainingCheckpointOfAScript, LoadsItsTensorsInPlace) {
  const TemporaryFolder folder;
  torch::jit::Module script = make_script(), other = make_script();
  const Tensor weight = script.attr("weight").toTensor();
  const Tensor offset = script.attr("backbone").toModule().attr("offset").toTensor();
  {
    const at::NoGradGuard no_grad;
    weight.add_(1);
    offset.add_(1);
  }
  TrainingCheckpoint(folder / "run.pt").add("model", script).save();
  const Tensor saved = weight.detach().clone();
  {
    const at::NoGradGuard no_grad;
    weight.zero_();
    offset.zero_();
  }
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("model", script).load());
  EXPECT_TRUE(at::equal(weight, saved));
  EXPECT_TRUE(at::equal(offset, torch::full({4}, 2.F)));
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("model", other).load());
  EXPECT_TRUE(at::equal(other.attr("weight").toTensor(), saved));
  EXPECT_TRUE(other.attr("weight").toTensor().requires_grad());
}

TEST(TrainingCheckpointFiles, HaveTheLongestNamesThatTheSystemAllows) {
#ifdef __linux__
  const TemporaryFolder folder;
  int step = 1;
  for (const std::size_t length : {236, 250, 255}) {
    SCOPED_TRACE(length);
    for (const std::string& letter : {std::string("x"), std::string("\xc3\xa9")}) {
      std::string name = length % 2 == 1 ? "y" : "";
      while (name.size() < length) name += letter;
      TrainingCheckpoint checkpoint(folder / name);
      checkpoint.add("step", step).save();
      step = 0;
      EXPECT_TRUE(checkpoint.load());
      EXPECT_EQ(step, 1);
    }
  }
  EXPECT_EQ(folder.files(), 6) << "and nothing is left";
#else
  SKIP_WITHOUT_LINUX();
#endif
}

}  // namespace
