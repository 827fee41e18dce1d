// SPDX-License-Identifier: BSD-3-Clause
// A whole training iteration as one CUDA graph: captured once, then replayed with one launch.
// Needs a GPU; skipped without one.
#include <torch/torch.h>
#include <torchamp/cuda_graph.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <vector>

#include "support/check.h"

int main() {
  if (!torch::cuda::is_available()) {
    std::cout << "skipped: this example needs a GPU\n";
    return 0;
  }
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 1));
  model->to(torch::kCUDA);
  torchamp::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  torchamp::GradScaler scaler;

  torchamp::CudaGraph iteration(optimizer, [&](const std::vector<torch::Tensor>& batch) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(torch::kCUDA);
      loss = torch::mse_loss(model->forward(batch[0]), batch[1]);
    }
    scaler.scale(loss).backward();
    torchamp::clip_grad_norm_(scaler, optimizer, /*max_norm=*/1.);
    scaler.step(optimizer);
    scaler.update();
    return loss;
  });

  double first = 0., last = 0.;
  for (int i = 0; i < 200; ++i) {
    const auto data = torch::rand({256, 8}, torch::kCUDA);
    const auto loss = iteration({data, data.sin().sum(1, /*keepdim=*/true)})[0];
    if (i == 0) first = loss.item<double>();  // read outside of the body
    if (i == 199) last = loss.item<double>();
  }
  std::cout << "loss " << first << " -> " << last << ", scale " << scaler.get_scale() << '\n';
  support::check(iteration.is_captured(), "the iteration is a graph");
  support::check(last < first / 20., "the loss has fallen to less than a twentieth");
}
