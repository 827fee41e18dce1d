// SPDX-License-Identifier: BSD-3-Clause
// The training loop by hand: a guard around the forward pass, a scaler around the backward pass,
// and a clip of the unscaled gradients between them.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <iostream>

#include "support/check.h"

namespace {

/// Within a guard, products run in 16 bits and sums in fp32. Outside, nothing changes.
void show_guards(torch::Device device) {
  const auto lower = device.is_cuda() ? torch::kHalf : torch::kBFloat16;
  const auto x = torch::rand({32, 32}, device), y = torch::rand({32, 32}, device);
  {
    torchamp::AutocastGuard autocast(device.type());
    const auto sum = x + y;
    const auto product = torch::matmul(x, y);
    std::cout << "x + y: " << sum.dtype() << ", x @ y: " << product.dtype() << '\n';
    support::check(sum.scalar_type() == torch::kFloat, "a sum is in fp32");
    support::check(product.scalar_type() == lower, "a product has the device's 16-bit dtype");
    support::check((product + product).scalar_type() == torch::kFloat,
                   "a sum of two products is in fp32");
    support::check(product.mean().scalar_type() == torch::kFloat, "a mean is in fp32");
  }
  {
    torchamp::AutocastGuard autocast(device.type(), torch::kBFloat16);
    const auto half = y.to(torch::kHalf);
    support::check((x + half).scalar_type() == torch::kFloat, "fp32 + fp16 is fp32");
    support::check(torch::matmul(x, half).scalar_type() == torch::kBFloat16,
                   "a guard can select the dtype");
    {
      torchamp::AutocastGuard off(device.type(), {.enabled = false});
      support::check(torch::matmul(x, y).scalar_type() == torch::kFloat,
                     "a nested guard can switch casts off");
    }
    support::check(torch::matmul(x, y).scalar_type() == torch::kBFloat16,
                   "its end restores the outer guard");
  }
  support::check(torch::matmul(x, y).scalar_type() == torch::kFloat,
                 "outside of a guard, fp32 stays fp32");
}

void train(torch::Device device) {
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 1));
  model->to(device);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  const auto data = torch::rand({256, 8}, device);
  const auto target = data.sin().sum(1, /*keepdim=*/true);

  torchamp::GradScaler scaler;
  double first = 0., last = 0.;
  for (int i = 0; i < 100; ++i) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(device.type());
      loss = torch::mse_loss(model->forward(data), target);
    }
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer);
    scaler.update();

    last = loss.item<double>();
    if (i == 0) first = last;
    if (i % 20 == 0) {
      std::cout << "step " << i << ": loss " << last << ", scale " << scaler.get_scale()
                << (result ? "" : ", skipped") << '\n';
    }
  }
  support::check(last < first / 20., "the loss has fallen to less than a twentieth");
}

/// A clip limits the norm of the true gradients, so it comes after unscale_.
void train_with_a_clip(torch::Device device) {
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
    scaler.step(optimizer);  // does not unscale a second time
    scaler.update();

    const double change = std::hypot((model->weight - weight).norm().item<double>(),
                                     (model->bias - bias).norm().item<double>());
    std::cout << "norm " << norm.item<double>() << ", the weights moved by " << change << '\n';
    support::check(norm.item<double>() > max_norm, "the gradients are too large");
    support::check(std::abs(change - learning_rate * max_norm) < 1e-4,
                   "the step is as long as the limit allows");
  }
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  show_guards(device);
  train(device);
  train_with_a_clip(device);
}
