// SPDX-License-Identifier: BSD-3-Clause
// A critic whose loss contains the gradient of its own output (WGAN-GP): scale what is
// differentiated, divide the gradient by the scale, then scale the loss as usual. In fp16 the
// first step is skipped: the initial scale, 65536, exceeds fp16's maximum.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <iostream>

#include "support/check.h"

struct Run {
  bool first_skipped = false;
  int skipped = 0;
  double first = 0., last = 0.;  // the penalties of the first and of the last step that was taken
};

Run train(double init_scale) {
  torch::manual_seed(0);
  torch::nn::Sequential critic(torch::nn::Linear(8, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 1));
  torchamp::FusedAdam optimizer(critic->parameters(), torch::optim::AdamOptions(1e-2));
  torchamp::GradScaler scaler({.init_scale = init_scale});
  Run run;
  int made = 0;
  for (int step = 0; step < 60; ++step) {
    const auto real = torch::randn({32, 8}) + 1, fake = torch::randn({32, 8});
    const auto between = torch::rand({32, 1});
    const auto inputs = (between * real + (1 - between) * fake).requires_grad_();
    optimizer.zero_grad();
    torch::Tensor distance, scores;
    {
      torchamp::AutocastGuard autocast(torch::kCPU, torch::kHalf);
      distance = critic->forward(fake).mean() - critic->forward(real).mean();
      scores = critic->forward(inputs);
    }
    const auto scaled = torch::autograd::grad({scaler.scale(scores.sum())}, {inputs}, {},
                                              /*retain_graph=*/true, /*create_graph=*/true)[0];
    const auto gradient = scaled / scaler.get_scale();  // waits for the device
    const auto penalty = (gradient.norm(2, 1) - 1).pow(2).mean();
    scaler.scale(distance + 10 * penalty).backward();
    const bool stepped = scaler.step(optimizer).stepped();
    scaler.update();

    if (step == 0) run.first_skipped = !stepped;
    if (!stepped) ++run.skipped;
    if (stepped && made++ == 0) run.first = penalty.item<double>();
    if (stepped) run.last = penalty.item<double>();
  }
  std::cout << "from a scale of " << init_scale << ": " << run.skipped
            << " steps skipped, penalty from " << run.first << " to " << run.last << '\n';
  return run;
}

int main() {
  const Run high = train(65536.), low = train(1024.);
  support::check(high.first_skipped, "65536 as a gradient in fp16 is infinite");
  support::check(high.skipped <= 6, "the scale fits after a few steps");
  support::check(low.skipped == 0, "a lower initial scale skips no step");
  support::check(high.last < high.first / 2 && low.last < low.first / 2,
                 "the gradient's norm approaches 1");
}
