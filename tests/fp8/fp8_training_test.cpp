// SPDX-License-Identifier: BSD-3-Clause
// fp8 over several micro-batches and several processes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <vector>

#include "torchamp/accumulate.h"
#include "torchamp/torchamp.h"
#if __has_include(<gloo/rendezvous/store.h>)
#include "support/launch.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/labs/fp8.h"
#endif

namespace {

using torchamp::AutocastGuard;
using torchamp::Fp8Options;
using torchamp::Fp8Recipe;

constexpr Fp8Recipe some_recipes[] = {Fp8Recipe::tensorwise, Fp8Recipe::mxfp8, Fp8Recipe::nvfp4};

torch::nn::Sequential fp8_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(12, 20), torch::nn::Tanh(),
                               torch::nn::Linear(20, 4));
}

/// The loss of a batch in fp8, rounded to the nearest so that it can be computed twice.
template <class Net>
torch::Tensor fp8_loss(Net& net, Fp8Recipe recipe, const torch::Tensor& batch) {
  const Fp8Options options{.recipe = recipe, .stochastic_rounding = false};
  const AutocastGuard guard(torch::kCPU, {.policy = torchamp::fp8(torchamp::Policy::standard(),
                                                                  torchamp::ops::dense, options)});
  return net.forward(batch).pow(2).mean();
}

/// The gradients of one batch's loss alone.
std::vector<torch::Tensor> fp8_gradients(torch::nn::Sequential& model, Fp8Recipe recipe,
                                         const torch::Tensor& batch) {
  return torch::autograd::grad({fp8_loss(*model, recipe, batch)}, model->parameters());
}

TEST(Fp8Accumulation, StepsWithTheMeanOfItsMicroBatches) {
  for (const Fp8Recipe recipe : some_recipes) {
    torch::nn::Sequential model = fp8_net();
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    torchamp::GradScaler scaler({.init_scale = 256.});
    torchamp::Accumulation accumulation(scaler, optimizer, 2);
    const torch::Tensor first = torch::randn({8, 12}), second = torch::randn({8, 12});
    const auto of_first = fp8_gradients(model, recipe, first);
    const auto of_second = fp8_gradients(model, recipe, second);
    std::vector<torch::Tensor> expected;
    for (std::size_t i = 0; i < of_first.size(); ++i) {
      const torch::Tensor mean = of_first[i] / 2 + of_second[i] / 2;
      expected.push_back(model->parameters()[i].detach() - 0.5 * mean);
    }
    EXPECT_FALSE(accumulation.backward(fp8_loss(*model, recipe, first)));
    EXPECT_TRUE(accumulation.backward(fp8_loss(*model, recipe, second))->stepped());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(model->parameters()[i].equal(expected[i])) << static_cast<int>(recipe) << i;
    }
  }
}

TEST(Fp8Accumulation, AnInfInOneMicroBatchSkipsTheStep) {
  for (const Fp8Recipe recipe : some_recipes) {
    torch::nn::Sequential model = fp8_net();
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    torchamp::GradScaler scaler({.init_scale = 256.});
    torchamp::Accumulation accumulation(scaler, optimizer, 2);
    const torch::Tensor before = model->parameters()[0].detach().clone();
    torch::Tensor bad = torch::randn({8, 12});
    bad[3][5] = std::numeric_limits<float>::infinity();
    accumulation.backward(fp8_loss(*model, recipe, torch::randn({8, 12})));
    EXPECT_FALSE(accumulation.backward(fp8_loss(*model, recipe, bad))->stepped());
    EXPECT_TRUE(model->parameters()[0].equal(before));
    EXPECT_EQ(scaler.get_scale(), 128.);
  }
}

#if __has_include(<gloo/rendezvous/store.h>)

TEST(Fp8Distributed, GradientsAreTheMeanOfTheProcessesOwnAndAnInfOnOneSkipsTheStepOnAll) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const Fp8Recipe recipe : some_recipes) {
    torch::nn::Sequential model = fp8_net(), alone = fp8_net();
    torchamp::DistributedDataParallel net(model, group, {.bucket_bytes = 300});
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    torchamp::GradScaler scaler({.init_scale = 256.});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      torch::Tensor batch = torch::randn({10, 12});
      const auto parts = batch.chunk(2);
      {
        const torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < 4; ++i) alone->parameters()[i].copy_(model->parameters()[i]);
      }
      const auto of_first = fp8_gradients(alone, recipe, parts[0]);
      const auto of_second = fp8_gradients(alone, recipe, parts[1]);
      const bool overflows = step == 1;
      if (overflows) parts[1][0][0] = std::numeric_limits<float>::infinity();
      const torch::Tensor part = parts[static_cast<std::size_t>(group->getRank())];
      scaler.scale(fp8_loss(net, recipe, part)).backward();
      for (std::size_t i = 0; i < 4 && !overflows; ++i) {
        const torch::Tensor mean = of_first[i] / 2 + of_second[i] / 2;
        EXPECT_TRUE((model->parameters()[i].grad() / scaler.get_scale()).equal(mean))
            << static_cast<int>(recipe) << step << i;
      }
      EXPECT_EQ(scaler.step(optimizer).stepped(), !overflows);
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 128.);
    expect_same_everywhere(group, model->parameters());
  }
}

#endif

}  // namespace
