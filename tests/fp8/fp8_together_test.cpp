// SPDX-License-Identifier: BSD-3-Clause
// fp8 with what else the library has.
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "support/weight_counts.h"
#include "torchamp/accumulate.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/labs/module_policy.h"
#include "torchamp/master_weights.h"
#include "torchamp/recompute.h"
#include "torchamp/torchamp.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Fp8Options;
using torchamp::Fp8Recipe;
using torchamp::Policy;
namespace ops = torchamp::ops;

Policy policy_of(Fp8Options options = {}) {
  return torchamp::fp8(Policy::standard(), ops::dense, options);
}

TEST(Fp8Weights, AreQuantizedOnceUntilTheOutermostGuardEnds) {
  const torch::Tensor x = torch::randn({4, 16}).requires_grad_();
  const torch::Tensor w = torch::randn({8, 16}).requires_grad_();
  for (const Fp8Recipe recipe : {Fp8Recipe::tensorwise, Fp8Recipe::mxfp8, Fp8Recipe::nvfp4}) {
    const auto before = weight_counts();
    torch::Tensor first;
    {
      const AutocastGuard guard(torch::kCPU, {.policy = policy_of({.recipe = recipe})});
      first = torch::linear(x, w);
      EXPECT_TRUE(torch::linear(x, w).equal(first));
      EXPECT_TRUE(x.mm(w.t()).equal(first)) << "by another op, through a view";
      EXPECT_EQ(weight_counts().misses, before.misses + 1);
      EXPECT_EQ(weight_counts().hits, before.hits + 2);
      EXPECT_GT(weight_counts().bytes, 0);
    }
    EXPECT_EQ(weight_counts().bytes, before.bytes);
    const AutocastGuard guard(torch::kCPU, {.policy = policy_of({.recipe = recipe})});
    EXPECT_TRUE(torch::linear(x, w).equal(first));
    EXPECT_EQ(weight_counts().misses, before.misses + 2);
  }
}

TEST(Fp8Weights, AreQuantizedAgainAfterAWriteOrWhenTheProgramSaysSo) {
  const torch::Tensor x = torch::randn({4, 16}), w = torch::randn({8, 16}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = policy_of()});
  const torch::Tensor first = torch::linear(x, w);
  {
    const torch::NoGradGuard no_grad;
    w.mul_(2);
  }
  EXPECT_TRUE(torch::linear(x, w).equal(first * 2));
  w.data().mul_(2);  // which LibTorch does not count
  torchamp::clear_weight_cache();
  EXPECT_TRUE(torch::linear(x, w).equal(first * 4));
}

TEST(Fp8Weights, AreNotKeptWithoutTheCacheNorForActivations) {
  const torch::Tensor x = torch::randn({4, 16}).requires_grad_();
  const torch::Tensor w = torch::randn({8, 16}).requires_grad_();
  const auto before = weight_counts();
  {
    const AutocastGuard guard(torch::kCPU, {.cache_enabled = false, .policy = policy_of()});
    (void)torch::linear(x, w);
    EXPECT_EQ(weight_counts().bytes, before.bytes);
  }
  const AutocastGuard guard(torch::kCPU, {.policy = policy_of()});
  (void)torch::linear(x, w.relu());
  (void)torch::linear(x, torch::randn({8, 16}));
  EXPECT_EQ(weight_counts().bytes, before.bytes);
}

TEST(Fp8Weights, ABackwardUsesWhatTheForwardUsedThoughTheWeightHasChanged) {
  const torch::Tensor x = torch::ones({2, 4}).requires_grad_();
  const torch::Tensor w = torch::ones({3, 4}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = policy_of()});
  const torch::Tensor y = torch::linear(x, w);
  {
    const torch::NoGradGuard no_grad;
    w.mul_(5);
  }
  EXPECT_TRUE(torch::linear(x, w).detach().equal(torch::full({2, 3}, 20, at::kBFloat16)));
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({2, 4}, 3.)));
}

torch::nn::Sequential small_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(12, 20), torch::nn::Tanh(),
                               torch::nn::Linear(20, 4));
}

TEST(Fp8Together, CheckpointsGiveTheSameGradientsTheRandomRoundingIncluded) {
  for (const Fp8Recipe recipe : {Fp8Recipe::tensorwise, Fp8Recipe::nvfp4}) {
    std::vector<torch::Tensor> gradients;
    for (const bool recompute : {false, true}) {
      torch::nn::Sequential model = small_model();
      const torch::Tensor x = torch::randn({6, 12}).requires_grad_();
      torch::Tensor y;
      {
        const AutocastGuard guard(torch::kCPU, {.policy = policy_of({.recipe = recipe})});
        const auto forward = [&](const torch::Tensor& input) { return model->forward(input); };
        y = recompute ? torchamp::checkpoint(forward, x) : forward(x);
      }
      torch::manual_seed(2);
      y.pow(2).sum().backward();
      gradients.push_back(model->parameters()[0].grad());
    }
    EXPECT_TRUE(gradients[0].equal(gradients[1])) << static_cast<int>(recipe);
  }
}

TEST(Fp8Together, MasterWeightsTrainAModelInBf16) {
  torch::nn::Sequential model = small_model();
  torchamp::MasterWeights masters(model, {.dtype = torch::kBFloat16});
  torch::optim::SGD optimizer(masters.parameters(), 0.1);
  const torch::Tensor x = torch::randn({16, 12}).to(torch::kBFloat16);
  const torch::Tensor target = torch::randn({16, 4});
  double first = 0, last = 0;
  torchamp::CastRecorder recorder;
  for (int i = 0; i < 10; ++i) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const AutocastGuard guard(torch::kCPU, {.policy = policy_of()});
      loss = torch::mse_loss(model->forward(x), target);
    }
    loss.backward();
    masters.take_gradients();
    optimizer.step();
    masters.copy_to_model();
    last = loss.item<double>();
    if (i == 0) first = last;
  }
  EXPECT_LT(last, first);
  EXPECT_EQ(recorder.report().total().fp8, 20);
}

TEST(Fp8Together, MicroBatchesOfOneStepAddUp) {
  torch::nn::Sequential model = small_model();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torchamp::GradScaler scaler({.init_scale = 256.});
  const torch::Tensor x = torch::randn({8, 12});
  optimizer.zero_grad();
  for (const torch::Tensor& part : x.chunk(2)) {
    const AutocastGuard guard(torch::kCPU, {.policy = policy_of()});
    scaler.scale(model->forward(part).pow(2).mean() / 2).backward();
  }
  const torch::Tensor before = model->parameters()[0].detach().clone();
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  scaler.update();
  EXPECT_FALSE(model->parameters()[0].equal(before));
}

TEST(Fp8Together, APolicyOfOneModuleHasTheRuleForThatModuleAlone) {
  struct NetImpl : torch::nn::Module {
    torchamp::WithPolicy<torch::nn::Linear> a, b;
    NetImpl() : a(8, 8), b(8, 8) {
      register_module("a", a);
      register_module("b", b);
    }
    torch::Tensor forward(const torch::Tensor& x) { return b(a(x)); }
  };
  auto net = std::make_shared<NetImpl>();
  torchamp::ModulePolicies{{"b", policy_of()}}.apply_to(*net);
  torchamp::CastRecorder recorder(*net);
  const AutocastGuard guard(torch::kCPU);
  (void)net->forward(torch::randn({3, 8}));
  const torchamp::CastReport report = recorder.report();
  for (const auto& row : report.rows()) {
    if (row.op != "addmm") continue;
    EXPECT_EQ(row.fp8, row.module == "b" ? 1 : 0) << report;
  }
  EXPECT_EQ(report.total().fp8, 1);
}

TEST(Fp8Together, ScriptsFollowTheRule) {
  torch::jit::Module module("Module");
  module.define("def forward(self, x, w):\n    return torch.linear(x, w)\n");
  const torch::Tensor x = torch::randn({3, 8}).requires_grad_();
  const torch::Tensor w = torch::randn({4, 8}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = policy_of()});
  const torch::Tensor expected = torch::linear(x, w);
  for (int run = 0; run < 3; ++run) {
    const torch::Tensor y = module.forward({x, w}).toTensor();
    EXPECT_TRUE(y.equal(expected));
    y.sum().backward();
  }
  EXPECT_TRUE(w.grad().defined());
}

}  // namespace
