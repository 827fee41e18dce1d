// SPDX-License-Identifier: BSD-3-Clause
// A TrainingCheckpoint that is loaded at other places than before the first iteration.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <array>
#include <exception>
#include <memory>

#include "support/expect_error.h"
#include "support/host_allocation_limit.h"
#include "support/temporary_folder.h"
#include "torchamp/accumulate.h"
#include "torchamp/autocast.h"
#include "torchamp/cast_cache.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/labs/weights_together.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/weight_cache.h"

namespace {

using at::Tensor;
using torchamp::TrainingCheckpoint;
using torchamp::WeightCache;

/// A model, its optimizer and a scaler, and a file of them after one iteration.
struct Recovery {
  Recovery() {
    iterate();
    checkpoint.add("net", net).add("optimizer", optimizer).add("scaler", scaler).save();
  }

  void backward() {
    optimizer.zero_grad();
    scaler.scale(net->forward(x).sum()).backward();
  }
  void iterate() {
    backward();
    scaler.step(optimizer);
    scaler.update();
  }

  const TemporaryFolder folder{};
  const Tensor x = at::arange(6.).view({2, 3}).to(at::kFloat);
  torch::nn::Linear net{3, 2};
  torch::optim::SGD optimizer{net->parameters(), 0.125};
  torchamp::GradScaler scaler{{.init_scale = 1024., .growth_interval = 4}};
  TrainingCheckpoint checkpoint{folder / "run.pt"};
};

TEST(TrainingCheckpointRecovery, LoadsWithinAnIterationWhichScalersThenForget) {
  for (const bool steps : {false, true}) {
    SCOPED_TRACE(steps);
    Recovery run;
    const Tensor saved = run.net->weight.detach().clone();
    run.iterate();
    run.backward();
    run.scaler.unscale_(run.optimizer);
    if (steps) run.scaler.step(run.optimizer);
    EXPECT_TRUE(run.checkpoint.load());
    EXPECT_TRUE(at::equal(run.net->weight, saved));
    EXPECT_EQ(run.scaler.state_dict().growth_tracker, 1);
    EXPECT_FALSE(run.scaler.is_unscaled(run.optimizer));
    EXPECT_FALSE(run.scaler.is_stepped(run.optimizer));
    run.iterate();
    EXPECT_TRUE(at::equal(run.net->bias.grad(), at::full({2}, 2.F))) << "unscaled";
    EXPECT_EQ(run.scaler.state_dict().growth_tracker, 2);
  }
}

TEST(TrainingCheckpointRecovery, EndsTheIterationOfEachOptimizer) {
  const TemporaryFolder folder;
  torch::nn::Linear first(3, 2), second(3, 2);
  torch::optim::SGD of_first(first->parameters(), 0.1), of_second(second->parameters(), 0.1);
  torchamp::GradScaler scaler;
  const auto backward = [&] {
    const Tensor x = at::ones({1, 3});
    scaler.scale(first->forward(x).sum() + second->forward(x).sum()).backward();
  };
  backward();
  scaler.step(of_first);
  scaler.step(of_second);
  scaler.update();
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("first", of_first).add("second", of_second).add("scaler", scaler).save();
  backward();
  scaler.step(of_first);
  scaler.step(of_second);
  EXPECT_TRUE(checkpoint.load());
  for (const torch::optim::SGD* const optimizer : {&of_first, &of_second}) {
    EXPECT_FALSE(scaler.is_stepped(*optimizer));
  }
}

TEST(TrainingCheckpointRecovery, KeepsAnIterationIfLoadingFails) {
  Recovery run;
  double missing = 0.;
  run.checkpoint.add("missing", missing);
  run.iterate();
  run.backward();
  run.scaler.unscale_(run.optimizer);
  const Tensor now = run.net->weight.detach().clone();
  EXPECT_ERROR((void)run.checkpoint.load(), "holds no 'missing'");
  EXPECT_TRUE(at::equal(run.net->weight, now));
  EXPECT_TRUE(run.scaler.is_unscaled(run.optimizer));
  EXPECT_EQ(run.scaler.state_dict().growth_tracker, 2);
  run.scaler.step(run.optimizer);
  run.scaler.update();
  EXPECT_TRUE(at::equal(run.net->bias.grad(), at::full({2}, 2.F)));
}

TEST(TrainingCheckpointRecovery, IsRefusedWithinAWindowOfAccumulation) {
  Recovery run;
  torchamp::Accumulation accumulation(run.scaler, run.optimizer, 2);
  run.optimizer.zero_grad();
  accumulation.backward(run.net->forward(run.x).sum());
  {
    const at::NoGradGuard no_grad;
    run.net->weight.fill_(7.);
  }
  EXPECT_ERROR(
      (void)run.checkpoint.load(),
      "this is within a window of gradient accumulation. First end it: Accumulation::flush() "
      "steps with it, discard() drops it.");
  EXPECT_EQ(run.net->weight[0][0].item<float>(), 7.F) << "as it was";
  accumulation.discard();
  EXPECT_TRUE(run.checkpoint.load());
}

TEST(TrainingCheckpointRecovery, IsRefusedWithinAWindowOfADisabledScaler) {
  const TemporaryFolder folder;
  torch::nn::Linear net(3, 2);
  torch::optim::SGD optimizer(net->parameters(), 0.125);
  torchamp::GradScaler scaler({.enabled = false});
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("net", net).add("optimizer", optimizer).add("scaler", scaler).save();
  torchamp::Accumulation accumulation(scaler, optimizer, 2);
  accumulation.backward(net->forward(at::ones({1, 3})).sum());
  EXPECT_ERROR((void)checkpoint.load(), "within a window of gradient accumulation");
  accumulation.discard();
  EXPECT_TRUE(checkpoint.load());
}

TEST(TrainingCheckpointRecovery, PutsAScalerBackWithoutMemory) {
  Recovery run;
  Tensor value = at::ones({4});
  TrainingCheckpoint(run.folder / "run.pt").add("scaler", run.scaler).add("value", value).save();
  run.iterate();
  const auto state = run.scaler.state_dict();
  int failures = 0;
  for (bool loaded = false; !loaded; ++failures) {
    ASSERT_LT(failures, 1000);
    TrainingCheckpoint checkpoint(run.folder / "run.pt");
    checkpoint.add("scaler", run.scaler).add("value", value);
    try {
      const HostAllocationLimit limit(failures);
      loaded = checkpoint.load();
    } catch (const std::exception&) {
      ASSERT_EQ(run.scaler.state_dict(), state) << failures;
    }
  }
  EXPECT_GT(failures, 2);
}

struct OneWeight : torch::nn::Module {
  Tensor weight = register_parameter("weight", at::ones({3, 3}));
};

TEST(TrainingCheckpointRecovery, GivesTheNewWeightsToARegionThatIsOpen) {
  const TemporaryFolder folder;
  const auto model = std::make_shared<OneWeight>();
  Tensor alone = at::ones({3, 3}).requires_grad_();
  double missing = 0.;
  TrainingCheckpoint checkpoint(folder / "run.pt"), unfit(folder / "run.pt");
  checkpoint.add("model", model).add("alone", alone).save();
  unfit.add("model", model).add("missing", missing);
  const Tensor x = at::ones({1, 3});
  const std::array<WeightCache, 3> caches{WeightCache::libtorch, torchamp::weights_together(),
                                          WeightCache::window};
  for (const WeightCache& cache : caches) {
    SCOPED_TRACE(&cache - caches.data());
    const torchamp::AutocastGuard autocast(at::kCPU, {.dtype = at::kBFloat16, .cache = cache});
    const auto product = [&x](const Tensor& weight) {
      return at::mm(x, weight)[0][0].item<float>();
    };
    const auto write = [&] {
      const at::NoGradGuard no_grad;
      model->weight.fill_(7.);
      alone.fill_(7.);
      torchamp::clear_weight_cache();
    };
    write();
    EXPECT_EQ(product(model->weight) + product(alone), 42.F);
    EXPECT_TRUE(checkpoint.load());
    EXPECT_EQ(product(model->weight), 3.F);
    EXPECT_EQ(product(alone), 3.F);
    write();
    EXPECT_EQ(product(model->weight), 21.F);
    EXPECT_ERROR((void)unfit.load(), "holds no 'missing'");
    EXPECT_EQ(product(model->weight), 21.F);
  }
}

TEST(TrainingCheckpointRecovery, LoadsInInferenceModeWhatTrainsOutsideOfIt) {
  const TemporaryFolder folder;
  const Tensor x = at::ones({1, 3});
  torch::nn::Linear straight(3, 2), resumed(3, 2);
  torch::optim::Adam one(straight->parameters()), other(resumed->parameters());
  const auto step = [&x](torch::nn::Linear& net, torch::optim::Adam& optimizer) {
    optimizer.zero_grad();
    net->forward(x).pow(2).sum().backward();
    optimizer.step();
  };
  Tensor value = at::ones({2}), undefined;
  step(straight, one);
  TrainingCheckpoint saved(folder / "run.pt"), loaded(folder / "run.pt");
  saved.add("net", straight).add("optimizer", one).add("value", value);
  loaded.add("net", resumed).add("optimizer", other).add("value", undefined);
  {
    const c10::InferenceMode inference;
    saved.save();
    EXPECT_TRUE(loaded.load());
  }
  step(straight, one);
  step(resumed, other);
  EXPECT_TRUE(at::equal(straight->weight, resumed->weight));
  EXPECT_TRUE(at::equal(undefined.add_(1), at::full({2}, 2.F)));
}

}  // namespace
