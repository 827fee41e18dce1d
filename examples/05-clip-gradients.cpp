// SPDX-License-Identifier: BSD-3-Clause
// Clipping limits the norm of the true gradients, so unscale them first.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <iostream>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  torch::nn::Linear model(16, 4);
  model->to(device);
  const double learning_rate = 0.1, max_norm = 0.5;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(learning_rate));
  const auto data = torch::randn({64, 16}, device);
  const auto target = 10. * torch::randn({64, 4}, device);

  torchamp::GradScaler scaler({.init_scale = 1024.});
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(device.type());
      loss = torch::mse_loss(model->forward(data), target);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    const auto norm = torchamp::clip_grad_norm_(model->parameters(), max_norm);

    const auto weight = model->weight.detach().clone(), bias = model->bias.detach().clone();
    scaler.step(optimizer);  // knows that the gradients are unscaled already
    scaler.update();

    const double change = std::hypot((model->weight - weight).norm().item<double>(),
                                     (model->bias - bias).norm().item<double>());
    std::cout << "norm " << norm.item<double>() << ", the weights moved by " << change << '\n';
    support::check(norm.item<double>() > max_norm, "the gradients were too large");
    support::check(std::abs(change - learning_rate * max_norm) < 1e-4,
                   "the step was as long as the limit allows");
  }
}
