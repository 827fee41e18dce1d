// SPDX-License-Identifier: BSD-3-Clause
// A whole iteration in one call: guard, scaler, clipping, accumulation, step and update.
#include <torch/torch.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_step.h>

#include <iostream>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 1));
  model->to(device);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  const auto data = torch::rand({250, 8}, device);
  const auto target = data.sin().sum(1, /*keepdim=*/true);

  torchamp::TrainingStep train(model, optimizer, {.max_grad_norm = 1., .micro_batches = 4});
  const auto error = [&] {
    return train.evaluate([&] { return torch::mse_loss(model->forward(data), target); })
        .item<double>();
  };
  const double first = error();
  for (int epoch = 0; epoch < 60; ++epoch) {
    for (std::int64_t part = 0; part < 5; ++part) {  // the fifth waits for its step
      const auto rows = torch::indexing::Slice(part * 50, part * 50 + 50);
      const auto result = train([&] {
        return torch::mse_loss(model->forward(data.index({rows})), target.index({rows}));
      });
      if (result.ended_window() && epoch % 10 == 0) {
        std::cout << "step " << train.steps() << ": loss " << result.loss() << ", norm "
                  << result.norm() << ", scale " << result.scale() << (result ? "" : ", skipped")
                  << '\n';
      }
    }
    train.finish();
  }
  support::check(train.steps() == 120, "each epoch takes two steps");
  support::check(error() < first / 20., "the error has fallen to less than a twentieth");
}
