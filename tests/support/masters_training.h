// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include <cmath>

#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/recompute.h"

// A training run in which masters meet what else a program may use.
namespace masters_training {

inline torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                               torch::nn::Linear(8, 2));
}

/// How it runs, in addition to the masters' options.
struct Run {
  bool takes_gradients = true;
  bool unscales = false;  ///< before every second clip
};

/// 20 steps of two recomputed micro-batches, clipped; one of them is skipped.
inline void train(torch::nn::Sequential& net, torchamp::MasterWeights& masters, const Run& run) {
  torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(0.01));
  torchamp::GradScaler scaler({.init_scale = 256.});
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    for (int batch = 0; batch < 2; ++batch) {
      const at::Tensor x = at::randn({8, 4});
      at::Tensor loss;
      {
        const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
        loss = torchamp::checkpoint(net, x).to(at::kFloat).pow(2).mean();
      }
      scaler.scale(step == 5 ? loss * INFINITY : loss).backward();
      if (run.takes_gradients) masters.take_gradients();
    }
    if (run.unscales && step % 2 == 0) scaler.unscale_(optimizer);
    torchamp::clip_grad_norm_(scaler, optimizer, 0.1);
    EXPECT_EQ(scaler.step(optimizer).stepped(), step != 5);
    scaler.update();
    masters.copy_to_model();
  }
}

}  // namespace masters_training
