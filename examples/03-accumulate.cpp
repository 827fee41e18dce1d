// SPDX-License-Identifier: BSD-3-Clause
// A large batch in four parts: their gradients add up, all under one scale, which may therefore
// change only after the step.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include "support/check.h"

namespace {

/// The mean loss of a batch under autocast.
torch::Tensor loss_of(torch::nn::Linear& model, const torch::Tensor& data,
                      const torch::Tensor& target) {
  torchamp::AutocastGuard autocast(data.device().type());
  return torch::mse_loss(model->forward(data), target);
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  torch::nn::Linear model(16, 4);
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto data = torch::randn({64, 16}, device);
  const auto target = torch::randn({64, 4}, device);

  loss_of(model, data, target).backward();
  const auto whole = model->weight.grad().clone();

  torchamp::GradScaler scaler;
  const int parts = 4;
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    for (int part = 0; part < parts; ++part) {
      const auto loss = loss_of(model, data.chunk(parts)[static_cast<std::size_t>(part)],
                                target.chunk(parts)[static_cast<std::size_t>(part)]);
      scaler.scale(loss / parts).backward();
    }
    if (i == 0) {
      const auto sum = model->weight.grad() / scaler.get_scale();
      const double error = (sum - whole).abs().max().item<double>();
      support::check(error < 0.02 * whole.abs().max().item<double>(),
                     "the parts' gradients add up to that of the whole batch");
    }
    support::check(scaler.step(optimizer).stepped(), "one step for all four parts");
    scaler.update();
  }
}
