// SPDX-License-Identifier: BSD-3-Clause
// Weights that change, or go, while their casts are kept.
#include "torchamp/weight_cache.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "support/leaf.h"
#include "support/memory_meter.h"
#include "support/weight_caches.h"
#include "torchamp/autocast.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/optim.h"
#include "torchamp/policy_text.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::WeightCache;
using weight_caches::expect_same;
using weight_caches::forward_of;
using weight_caches::make_net;
using weight_caches::own_caches;
using weight_caches::Tensors;
using weight_caches::values_and_gradients;
using weight_caches::WeightCaches;
using weight_caches::with;

TEST_F(WeightCaches, DetectsWritesInsideARegion) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  for (const WeightCache cache : own_caches) {
    const AutocastGuard guard(at::kCPU, with(cache));
    for (int i = 0; i < 3; ++i) {
      const auto actual = net->forward(input);
      {
        const AutocastGuard plainly(at::kCPU, with(WeightCache::none));
        EXPECT_TRUE(actual.equal(net->forward(input)));
      }
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.mul_(1.5);
    }
  }
}

TEST_F(WeightCaches, DetectsWritesInsideARegionUnderRulesThatItTakesNoCastsFrom) {
  namespace ops = torchamp::ops;
  using torchamp::Policy;
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const torchamp::When each_time{.predicate = [](const torchamp::OpCall&) { return true; }};
  const auto step = [&] {
    auto result = net->forward(input);
    return result.addmm_(torch::ones({3, 1}), net->parameters().back().unsqueeze(0));
  };
  const Policy policies[] = {
      Policy::standard(), Policy::standard().native(ops::matmul, each_time),
      torchamp::fp8(Policy::standard(), ops::dense),
      torchamp::fp8(Policy::standard(), ops::dense, torchamp::Fp8Options::worthwhile())};
  for (const WeightCache cache : own_caches) {
    for (const Policy& policy : policies) {
      const AutocastGuard guard(at::kCPU, {.policy = policy, .cache = cache});
      for (int i = 0; i < 3; ++i) {
        const auto actual = step();
        {
          const AutocastGuard on(at::kCPU, {.cache_enabled = true});
          EXPECT_TRUE(actual.equal(step())) << policy;
        }
        const AutocastGuard plainly(at::kCPU, with(WeightCache::none));
        EXPECT_TRUE(actual.equal(step())) << policy;
        const torch::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.mul_(1.5);
      }
    }
  }
}

TEST_F(WeightCaches, TakesReportsOfWritesThatLibTorchDoesNotCount) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const auto run = [&](WeightCache cache) {
    const torch::NoGradGuard no_grad;
    const AutocastGuard guard(at::kCPU, with(cache));
    return net->forward(input);
  };
  const auto write = [&] {
    for (auto& parameter : net->parameters()) parameter.data().add_(1);
  };
  const auto old = run(WeightCache::kept);
  write();
  // A write that is not reported is not detected, as the documentation says.
  EXPECT_TRUE(run(WeightCache::kept).equal(old));
  torchamp::weights_changed();
  EXPECT_TRUE(run(WeightCache::kept).equal(run(WeightCache::none)));
  write();
  torchamp::weights_changed(net->parameters());
  EXPECT_TRUE(run(WeightCache::kept).equal(run(WeightCache::none)));
  write();
  torchamp::clear_weight_cache();
  EXPECT_TRUE(run(WeightCache::kept).equal(run(WeightCache::none)));
}

TEST_F(WeightCaches, DetectsStepsOfOtherTensorsInTheMemoryOfAWeight) {
  const auto input = torch::randn({3, 8});
  for (const bool by_scaler : {true, false}) {
    torch::nn::Linear trained(8, 4), replica(8, 4);
    replica->weight.set_data(trained->weight);  // has its own version counter
    const auto run = [&](WeightCache cache) {
      const torch::NoGradGuard no_grad;
      const AutocastGuard guard(at::kCPU, with(cache));
      return replica->forward(input);
    };
    torchamp::FusedSGD fused({trained->weight}, torch::optim::SGDOptions(0.5));
    torch::optim::SGD plain({trained->weight}, torch::optim::SGDOptions(0.5));
    torchamp::GradScaler scaler;
    for (int step = 0; step < 3; ++step) {
      (void)run(WeightCache::kept);
      scaler.scale(trained->weight.pow(2).sum()).backward();
      by_scaler ? void(scaler.step(plain)) : void(fused.step());
      if (by_scaler) scaler.update();
      EXPECT_TRUE(run(WeightCache::kept).equal(run(WeightCache::none)));
    }
  }
}

TEST_F(WeightCaches, DetectsStepsOfAWeightThatHasOtherMemoryForEvaluations) {
  torch::nn::Linear net(8, 4);
  torch::optim::SGD optimizer({net->weight}, torch::optim::SGDOptions(0.5));
  torchamp::GradScaler scaler;
  const auto average = net->weight.detach().clone();
  const auto input = torch::randn({3, 8});
  for (int step = 0; step < 3; ++step) {
    {
      const torch::NoGradGuard no_grad;
      const auto trained = net->weight.tensor_data();
      net->weight.set_data(average);
      const auto run = [&](WeightCache cache) {
        const AutocastGuard guard(at::kCPU, with(cache));
        return net->forward(input);
      };
      EXPECT_TRUE(run(WeightCache::kept).equal(run(WeightCache::none))) << step;
      net->weight.set_data(trained);
    }
    scaler.scale(net->weight.pow(2).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
    average.lerp_(net->weight.detach(), 0.5);  // a write that only `average` counts
  }
}

TEST_F(WeightCaches, DetectsWritesToTheFlatTensorOfVectorToParameters) {
  namespace utils = torch::nn::utils;
  const auto input = torch::randn({3, 8});
  for (const WeightCache cache : own_caches) {
    auto net = make_net();
    const torch::NoGradGuard no_grad;
    const auto flat = utils::parameters_to_vector(net->parameters()).clone();
    utils::vector_to_parameters(flat, net->parameters());
    const AutocastGuard guard(at::kCPU, with(cache));
    for (int i = 0; i < 3; ++i) {
      const auto actual = net->forward(input);
      const AutocastGuard plainly(at::kCPU, with(WeightCache::none));
      EXPECT_TRUE(actual.equal(net->forward(input))) << i;
      flat.mul_(1.5);
    }
  }
}

TEST_F(WeightCaches, TakeReportsOfWritesToAFlatTensorOfOneWeight) {
  torch::nn::Linear net(torch::nn::LinearOptions(8, 4).bias(false));
  const auto input = torch::randn({3, 8});
  const torch::NoGradGuard no_grad;
  const auto flat = net->weight.flatten().clone();
  torch::nn::utils::vector_to_parameters(flat, {net->weight});  // as large as the weight
  const auto run = [&](WeightCache cache) {
    const AutocastGuard guard(at::kCPU, with(cache));
    return net->forward(input);
  };
  const auto old = run(WeightCache::kept);
  flat.mul_(1.5);
  // A write that is not reported is not detected, as the documentation says.
  EXPECT_TRUE(run(WeightCache::kept).equal(old));
  torchamp::weights_changed(flat);
  EXPECT_TRUE(run(WeightCache::kept).equal(run(WeightCache::none)));
}

TEST_F(WeightCaches, HoldFewCastsOfLeavesThatAreGoneInALongRegion) {
  const auto held_by = [](WeightCache cache) {
    const MemoryMeter meter;
    const AutocastGuard guard(at::kCPU, with(cache));
    const auto column = torch::ones({512, 1}, at::kBFloat16);
    for (int i = 0; i < 200; ++i) {
      const auto leaf = torch::zeros({512, 512}, at::requires_grad());  // 512 KiB in bf16
      (void)leaf.mm(column);
    }
    return meter.bytes() >> 20;
  };
  EXPECT_GE(held_by(WeightCache::libtorch), 100) << "this is what the documentation says";
  EXPECT_LE(held_by(WeightCache::region), 40) << "twice the least that is looked through";
}

/// Trains for some steps, and returns the weights.
template <class Optimizer, class Options>
Tensors trained(WeightCache cache, const Options& options, bool region_around, bool by_scaler) {
  torch::manual_seed(3);
  auto net = make_net();
  Optimizer optimizer(net->parameters(), options);
  torchamp::GradScaler scaler({.init_scale = 8., .enabled = by_scaler});
  const auto input = torch::randn({3, 8});
  const auto steps = [&] {
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      for (int micro = 0; micro < 2; ++micro) {
        at::Tensor loss;
        {
          const AutocastGuard guard(at::kCPU, with(cache));
          loss = net->forward(input * (micro + 1)).pow(2).mean();
        }
        scaler.scale(loss).backward();
      }
      scaler.step(optimizer);
      scaler.update();
    }
  };
  if (region_around) {
    const AutocastGuard guard(at::kCPU, with(cache));
    steps();
  } else {
    steps();
  }
  Tensors weights;
  for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

template <class Optimizer, class Options>
void expect_trains_alike(const Options& options, const char* name) {
  for (const bool by_scaler : {false, true}) {  // a disabled one's step is the optimizer's own
    const auto expected = trained<Optimizer>(WeightCache::none, options, false, by_scaler);
    for (const auto cache : own_caches) {
      for (const bool region_around : {false, true}) {
        expect_same(trained<Optimizer>(cache, options, region_around, by_scaler), expected, name);
      }
    }
  }
}

TEST_F(WeightCaches, DetectsTheStepsOfOptimizers) {
  expect_trains_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.1), "SGD");
  expect_trains_alike<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1), "AdamW");
  expect_trains_alike<torchamp::FusedSGD>(torch::optim::SGDOptions(0.1), "FusedSGD");
  expect_trains_alike<torchamp::FusedAdamW>(torch::optim::AdamWOptions(0.1), "FusedAdamW");
}

// LibTorch's SGD writes to `.data()`, whose writes nobody counts.
TEST_F(WeightCaches, SeesAStepOfEveryGroupOfAnOptimizer) {
  const Tensors weights{leaf({4, 4}), leaf({4, 4})};
  const at::Tensor input = torch::randn({2, 4});
  const auto forward = [&](const at::Tensor& x) { return x.mm(weights[0]).mm(weights[1]); };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const at::Tensor& weight : weights) groups.emplace_back(Tensors{weight});
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(0.5));
  torchamp::GradScaler scaler({.init_scale = 4.});
  for (const WeightCache cache : own_caches) {
    for (int i = 0; i < 2; ++i) {
      expect_same(values_and_gradients(with(cache), forward, input, weights),
                  values_and_gradients(with(WeightCache::none), forward, input, weights), "cache");
      optimizer.zero_grad();
      scaler.scale(forward(input).sum()).backward();
      scaler.step(optimizer);
      scaler.update();
    }
  }
}

TEST_F(WeightCaches, SeesNewMemoryInTheStorageOfAWeight) {
  const at::Tensor weight = leaf({4, 4}), input = torch::randn({2, 4});
  const auto forward = [&](const at::Tensor& x) { return x.mm(weight); };
  for (const WeightCache cache : own_caches) {
    const AutocastGuard guard(at::kCPU, with(cache));
    for (int i = 0; i < 2; ++i) {
      const at::Tensor actual = forward(input);
      {
        const AutocastGuard plainly(at::kCPU, with(WeightCache::none));
        EXPECT_TRUE(actual.equal(forward(input)));
      }
      const at::Tensor other = torch::randn({4, 4});
      c10::DataPtr memory = c10::GetCPUAllocator()->allocate(other.nbytes());
      std::memcpy(memory.get(), other.const_data_ptr(), other.nbytes());
      weight.storage().set_data_ptr_noswap(std::move(memory));
    }
  }
}

TEST_F(WeightCaches, KeepsCastsForAWindowOfMicroBatches) {
  auto net = make_net();
  torchamp::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  torchamp::GradScaler scaler;
  const auto input = torch::randn({3, 8});
  for (int step = 1; step <= 3; ++step) {
    for (int micro = 0; micro < 4; ++micro) {
      at::Tensor loss;
      {
        const AutocastGuard guard(at::kCPU, with(WeightCache::window));
        loss = net->forward(input).mean();
      }
      scaler.scale(loss).backward();
    }
    EXPECT_GT(bytes(), 0);
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(bytes(), 0);
    EXPECT_EQ(misses(), 4 * step);
  }
}

TEST_F(WeightCaches, CastsIntoTheSameMemoryUnlessAGraphHoldsIt) {
  const auto weight = leaf({64, 64});
  const auto input = torch::randn({4, 64});
  const auto run = [&] {
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    return input.mm(weight);
  };
  const auto change = [&] {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  };
  run();
  const auto kept = bytes();
  auto held = leaf({4, 64});
  at::Tensor product;
  {
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    product = (held * 1).mm(weight);  // holds the cast for held's gradient
  }
  const auto cast = weight.detach().to(at::kBFloat16);
  change();
  EXPECT_TRUE(run().equal(input.to(at::kBFloat16).mm(weight.detach().to(at::kBFloat16))));
  product.sum().backward();  // not with the new values
  EXPECT_TRUE(held.grad().equal(torch::ones({4, 64}, at::kBFloat16).mm(cast.t()).to(at::kFloat)));
  EXPECT_EQ(bytes(), kept);
}

TEST_F(WeightCaches, SurvivesWhatBecomesOfModels) {
  const auto input = torch::randn({3, 8});
  const auto check = [&](torch::nn::Sequential& net, const char* what) {
    expect_same(
        values_and_gradients(with(WeightCache::kept), forward_of(net), input, net->parameters()),
        plain(forward_of(net), input, net->parameters()), what);
  };
  auto net = make_net();
  check(net, "new");
  auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  torch::nn::Sequential cloned(copy);
  check(cloned, "clone");
  net->to(at::kDouble);
  net->to(at::kFloat);
  check(net, "to and back");
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.set_data(torch::randn_like(parameter));
  }
  check(net, "set_data");
  std::stringstream file;
  torch::save(cloned, file);
  torch::load(net, file);
  check(net, "load");
  {
    torch::optim::Adam first(net->parameters(), torch::optim::AdamOptions(0.1));
    net->forward(input).sum().backward();
    first.step();
  }
  check(net, "a step");
  torch::optim::AdamW second(net->parameters(), torch::optim::AdamWOptions(0.1));
  second.step();
  check(net, "another optimizer's");
  for (int i = 0; i < 20; ++i) {
    auto other = make_net();  // at the address of an earlier one
    check(other, "freed and made again");
  }
  // Two tensors, one memory, and a counter each.
  auto alias = make_net();
  for (std::size_t i = 0; i < 4; ++i) {
    alias->parameters()[i].set_data(net->parameters()[i].detach());
  }
  check(alias, "alias");
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : alias->parameters()) parameter.mul_(2);
  }
  check(alias, "alias, written");
}

TEST_F(WeightCaches, FreesCastsOfWeightsThatAreGone) {
  {
    auto net = make_net();
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(torch::randn({3, 8}));
  }
  auto net = make_net();
  {
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(torch::randn({3, 8}));
  }
  EXPECT_EQ(bytes(), 2 * (8 * 16 + 16 + 16 * 4 + 4));
}

TEST_F(WeightCaches, FreesWhatItKeptOfAModelThatIsGoneAtTheNextGuardStepOrCount) {
  constexpr int64_t kept = 2 * (8 * 16 + 16 + 16 * 4 + 4);
  auto weight = leaf({1});
  weight.mutable_grad() = torch::ones({1});
  torchamp::FusedSGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  optimizer.step();  // which makes its states
  const std::function<void()> occasions[] = {
      [] { const AutocastGuard guard(at::kCPU, at::kBFloat16); },
      [&] { optimizer.step(); },
      [] { torchamp::clear_weight_cache(); },
      [] { EXPECT_EQ(bytes(), 0); },
  };
  for (std::size_t i = 0; i < std::size(occasions); ++i) {
    SCOPED_TRACE(i);
    const auto input = torch::randn({3, 8});
    const MemoryMeter meter;
    {
      auto net = make_net();
      const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
      const torch::NoGradGuard no_grad;
      net->forward(input);
    }
    EXPECT_GE(meter.bytes(), kept) << "nobody has looked yet";
    occasions[i]();
    EXPECT_EQ(meter.bytes(), 0);
  }
}

}  // namespace
