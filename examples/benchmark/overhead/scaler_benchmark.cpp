// SPDX-License-Identifier: BSD-3-Clause
// What a GradScaler costs per step: unscale, check, clip, step and update, with optimizers whose
// own work is nothing, for 10, 100 and 1000 parameters of 64 elements on the CPU. Prints lines of
// the kind, the number of parameters and microseconds, the best of several rounds.
// scaler_benchmark.py sets Python's torch.amp.GradScaler beside it.
#include <ATen/Parallel.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <vector>

namespace {

struct Idle : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure = nullptr) override { return {}; }
};

struct IdleFused : torchamp::FusedOptimizer {
  IdleFused(const std::vector<at::Tensor>& params, const torch::optim::SGDOptions& options)
      : FusedOptimizer({torch::optim::OptimizerParamGroup(params)},
                       std::make_unique<torch::optim::SGDOptions>(options)) {}
  void step_fused(const at::Tensor&, const at::Tensor&, bool) override {}
};

enum class Before { nothing, unscale, clip };

template <typename Optimizer>
double microseconds(int parameters, Before before = Before::nothing) {
  std::vector<at::Tensor> all;
  for (int i = 0; i < parameters; ++i) {
    all.push_back(torch::zeros({64}, torch::requires_grad()));
    all.back().mutable_grad() = torch::zeros({64});
  }
  Optimizer optimizer(all, torch::optim::SGDOptions(1.));
  torchamp::GradScaler scaler;
  scaler.scale(torch::ones({}));
  const int steps = std::max(20, 20000 / parameters);
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      if (before == Before::unscale) scaler.unscale_(optimizer);
      if (before == Before::clip) torchamp::clip_grad_norm_(scaler, optimizer, 1.);
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
    const auto print = [&](const char* kind, double time) {
      std::cout << kind << ' ' << parameters << ' ' << time << '\n';
    };
    print("plain", microseconds<Idle>(parameters));
    print("unscaled", microseconds<Idle>(parameters, Before::unscale));
    print("clipped", microseconds<Idle>(parameters, Before::clip));
    print("fused", microseconds<IdleFused>(parameters));
    print("fused_clipped", microseconds<IdleFused>(parameters, Before::clip));
  }
}
