// SPDX-License-Identifier: BSD-3-Clause
// A small training program, for include_time.sh: the time to compile a file that uses torchamp.
#include <torch/torch.h>

#include <cstdio>
#ifdef WITH_TORCHAMP
#include <torchamp/torchamp.h>
#endif

int main() {
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 1));
#ifdef WITH_TORCHAMP
  torchamp::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
  torchamp::GradScaler scaler;
#else
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
#endif
  for (int i = 0; i < 10; ++i) {
    const torch::Tensor data = torch::randn({4, 8}), target = torch::randn({4, 1});
    optimizer.zero_grad();
    torch::Tensor loss;
    {
#ifdef WITH_TORCHAMP
      torchamp::AutocastGuard autocast(torch::kCPU);
#endif
      loss = torch::mse_loss(model->forward(data), target);
    }
#ifdef WITH_TORCHAMP
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
#else
    loss.backward();
    optimizer.step();
#endif
    std::printf("%g\n", loss.item<double>());
  }
}
