// SPDX-License-Identifier: BSD-3-Clause
// The public names that programs are compiled against, used as their authors would. A change that
// breaks this file, or the kinds of support/optimizer_kinds.h, breaks them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <list>
#include <sstream>
#include <string>
#include <vector>

#include "support/optimizer_kinds.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/lr_scheduler.h"
#include "torchamp/policy_text.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_step.h"

namespace {

TEST(Contract, Policy) {
  using torchamp::Cast;
  for (const Cast cast : {Cast::native, Cast::lower_precision, Cast::fp32, Cast::promote,
                          Cast::unchanged, Cast::fp8}) {
    (void)cast;
  }
  const std::list<std::string> list{"relu"};
  torchamp::Policy policy = torchamp::Policy::standard();
  torchamp::Policy& self = policy.lower_precision({"mul", "div"})
                               .fp32(list)
                               .promote(std::vector<const char*>{"maximum"})
                               .unchanged({"softmax.int"})
                               .native(torchamp::ops::addition);
  EXPECT_EQ(&self, &policy);
  policy = torchamp::fp8(policy, torchamp::ops::dense);
  policy = torchamp::fp8(policy, torchamp::ops::linear, torchamp::Fp8Options{});
  policy = torchamp::fp8(policy, {"mm"}, {.recipe = torchamp::Fp8Recipe::tensorwise});
  policy =
      torchamp::fp8(policy, {"mm"}, {.recipe = torchamp::Fp8Recipe::tensorwise, .strict = true},
                    {.dtype = torch::kBFloat16});
  policy = torchamp::fp8(policy, "addmm", torchamp::Fp8Options::worthwhile());
  policy.set(Cast::fp8, {"matmul"}).set(Cast::fp32, {"matmul"}, {.dtype = torch::kHalf});
  EXPECT_EQ(policy.lookup("mm", torch::kCPU), Cast::fp8);
  policy = torchamp::Policy::torch();
  const Cast rule = policy.lookup(std::string_view("softmax.int"), torch::kCUDA);
  EXPECT_EQ(rule, Cast::native);
  EXPECT_EQ(policy.lookup("softmax.int", torch::Device(torch::kCUDA, 0)), Cast::native);
  std::ostringstream out;
  out << policy << rule;
  EXPECT_FALSE(out.str().empty());
  for (const auto& family : {torchamp::ops::matmul, torchamp::ops::conv, torchamp::ops::linear,
                             torchamp::ops::addition, torchamp::ops::reduction, torchamp::ops::norm,
                             torchamp::ops::softmax, torchamp::ops::loss}) {
    for (const std::string_view op : family) EXPECT_FALSE(op.empty());
  }
}

TEST(Contract, AutocastGuard) {
  const torchamp::AutocastGuard plain(torch::kCPU);
  const torchamp::AutocastGuard dtype(torch::kCPU, torch::kBFloat16);
  const torchamp::AutocastGuard options(torch::kCPU, {.dtype = torch::kHalf,
                                                      .enabled = true,
                                                      .cache_enabled = false,
                                                      .policy = torchamp::Policy::torch()});
  torchamp::AutocastOptions values;
  values.enabled = false;
  const torchamp::AutocastGuard named(torch::kCPU, values);
  const torch::Device device = torch::rand({1}).device();
  const torchamp::AutocastGuard of_device(device);
  const torchamp::AutocastGuard of_device_and_dtype(device, torch::kBFloat16);
  const torchamp::AutocastGuard of_device_and_options(device, {.enabled = false});
}

struct Training {
  torch::nn::Linear model{4, 2};
  torch::Tensor x = torch::rand({3, 4});
  torch::Tensor loss() { return model(x).pow(2).mean(); }
};

TEST(Contract, GradScaler) {
  Training t;
  torch::optim::SGD optimizer(t.model->parameters(), 0.1);
  torchamp::GradScaler by_default;
  torchamp::GradScaler scaler({.init_scale = 1024.,
                               .growth_factor = 2.,
                               .backoff_factor = 0.5,
                               .growth_interval = 100,
                               .enabled = true});
  const torch::Tensor scaled = scaler.scale(t.loss());
  const std::vector<torch::Tensor> list = scaler.scale({t.loss(), t.loss()});
  EXPECT_EQ(list.size(), 2u);
  scaled.backward();
  scaler.unscale_(optimizer);
  const torchamp::StepResult result = scaler.step(optimizer);
  EXPECT_TRUE(result.stepped());
  scaler.update();
  scaler.update(512.);
  scaler.update(torch::tensor(256.F));
  const double scale = scaler.get_scale();
  EXPECT_EQ(scale, 256.);
  scaler.set_growth_factor(scaler.get_growth_factor());
  scaler.set_backoff_factor(scaler.get_backoff_factor());
  scaler.set_growth_interval(scaler.get_growth_interval());
  EXPECT_TRUE(scaler.is_enabled());

  const torchamp::GradScalerState state = scaler.state_dict();
  EXPECT_EQ(state.scale, 256.);
  EXPECT_EQ(state.growth_factor, 2.);
  EXPECT_EQ(state.backoff_factor, 0.5);
  EXPECT_EQ(state.growth_interval, 100);
  EXPECT_EQ(state.growth_tracker, 1);
  by_default.load_state_dict(state);
  std::stringstream file;
  torch::save(scaler, file);
  torchamp::GradScaler loaded;
  torch::load(loaded, file);
  EXPECT_EQ(loaded.get_scale(), 256.);
  torch::serialize::OutputArchive archive;
  scaler.save(archive);
}

TEST(Contract, FusedOptimizersAndClipping) {
  for (const Kind& kind : kinds_with_state()) {
    Training t;
    const auto of_parameters = kind.fused_of_parameters(t.model->parameters());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(t.model->parameters());
    const auto of_groups = kind.fused(groups);
    torch::optim::Optimizer& optimizer = *of_parameters;
    torchamp::GradScaler scaler;
    const torch::Tensor before = t.model->weight.detach().clone();
    scaler.scale(t.loss()).backward();
    scaler.unscale_(optimizer);
    const torch::Tensor norm = torchamp::clip_grad_norm_(t.model->parameters(), 1.0);
    EXPECT_GT(norm.item<double>(), 0.);
    (void)torchamp::clip_grad_norm_(t.model->parameters(), 1.0, 1.0);
    EXPECT_TRUE(scaler.step(optimizer).stepped());
    scaler.update();
    EXPECT_FALSE(torch::equal(before, t.model->weight));
  }
}

TEST(Contract, MuonSchedulesAndSeveralOptimizers) {
  Training t;
  const torchamp::MuonOptions options =
      torchamp::MuonOptions()
          .lr(1e-3)
          .weight_decay(0.1)
          .momentum(0.95)
          .nesterov(true)
          .ns_coefficients({3.4445, -4.7750, 2.0315})
          .eps(1e-7)
          .ns_steps(5)
          .adjust_lr(torchamp::MuonOptions::AdjustLr::match_rms_adamw);
  torchamp::FusedMuon muon({t.model->weight}, options);
  torchamp::FusedAdamW adamw({t.model->bias}, torch::optim::AdamWOptions(1e-2));
  torchamp::WarmupCosine rates(muon,
                               {.warmup_steps = 100, .total_steps = 10000, .min_lr_ratio = 0.1});
  torchamp::WarmupLinear others(adamw, {.warmup_steps = 100, .total_steps = 10000});
  torchamp::TrainingStep train(t.model, {muon, adamw}, {.scheduler = {rates, others}});
  EXPECT_TRUE(train([&] { return t.loss(); }).stepped());
  EXPECT_DOUBLE_EQ(muon.param_groups()[0].options().get_lr(), 1e-5);
}

}  // namespace
