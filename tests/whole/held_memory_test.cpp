// SPDX-License-Identifier: BSD-3-Clause
// Counts what torchamp keeps for the life of a process: tables, kernels, policies of guards.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <cstddef>
#include <iostream>

#include "torchamp/autocast.h"
#include "torchamp/cpu_products.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

namespace {

void train_without() {
  torch::nn::Linear model(8, 8);
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  for (int i = 0; i < 3; ++i) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor loss = model->forward(at::ones({8, 8})).sum();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

void train() {
  torch::nn::Linear model(8, 8);
  torchamp::FusedAdamW optimizer(model->parameters(), 1e-3);
  torchamp::GradScaler scaler;
  for (int i = 0; i < 3; ++i) {
    at::Tensor loss;
    {
      const torchamp::AutocastGuard autocast(at::kCPU);
      loss = model->forward(at::ones({8, 8})).sum();
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
}

TEST(AProcess, HoldsLessThanTwoMegabytesOfTorchampsAfterItsSteps) {
  if (mallinfo2().uordblks == 0) GTEST_SKIP() << "malloc is not glibc's";
  train_without();  // what LibTorch keeps
  // With all of torchamp's kernels. A measurement of the CPU would leave kernels of oneDNN.
  torchamp::set_cpu_products(torchamp::CpuProducts::fp32);
  const auto run = [before = mallinfo2().uordblks] {
    for (int i = 0; i < 100; ++i) train();
    return mallinfo2().uordblks - before;
  };
  const std::size_t held = run();
  EXPECT_LT(run(), held + 1000);  // nothing more
  EXPECT_GT(held, 10'000);        // counts
  EXPECT_LT(held, 2'000'000);
  std::cout << "torchamp holds " << held << " bytes\n";
}

}  // namespace
