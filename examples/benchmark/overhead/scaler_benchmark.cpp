// SPDX-License-Identifier: BSD-3-Clause
// What a GradScaler costs per step: unscale, check, step and update, with optimizers whose own work
// is nothing, for 10, 100 and 1000 parameters of 64 elements on the CPU. Prints lines of the kind,
// the number of parameters and microseconds, the best of several rounds. scaler_benchmark.py sets
// Python's torch.amp.GradScaler beside it.
#include <ATen/Parallel.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/scaled_step.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <vector>

namespace {

struct Idle : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure = nullptr) override { return {}; }
};

struct IdleFused : Idle, torchamp::ScaledStep {
  using Idle::Idle;
  at::Tensor step_scaled(const at::Tensor&, const at::Tensor&) override { return {}; }
};

template <typename Optimizer>
double microseconds(int parameters, bool unscales) {
  std::vector<at::Tensor> all;
  for (int i = 0; i < parameters; ++i) {
    all.push_back(torch::zeros({64}, torch::requires_grad()));
    all.back().mutable_grad() = torch::ones({64});
  }
  Optimizer optimizer(all, torch::optim::SGDOptions(1.));
  torchamp::GradScaler scaler({.init_scale = 1.});
  scaler.scale(torch::ones({}));
  const int steps = std::max(20, 20000 / parameters);
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      if (unscales) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
    }
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count() / steps);
  }
  return best;
}

}  // namespace

int main() {
  at::set_num_threads(1);
  for (const int parameters : {10, 100, 1000}) {
    std::cout << "plain " << parameters << ' ' << microseconds<Idle>(parameters, false) << '\n'
              << "unscaled " << parameters << ' ' << microseconds<Idle>(parameters, true) << '\n'
              << "fused " << parameters << ' ' << microseconds<IdleFused>(parameters, false)
              << '\n';
  }
}
