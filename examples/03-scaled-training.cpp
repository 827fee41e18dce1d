// SPDX-License-Identifier: BSD-3-Clause
// The training loop: a guard around the forward pass, a scaler around the backward pass.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <iostream>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
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
