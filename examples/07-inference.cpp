// SPDX-License-Identifier: BSD-3-Clause
// Inference: a guard with autograd off. Nothing needs a scaler.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <iostream>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(32, 128), torch::nn::ReLU(),
                              torch::nn::Linear(128, 10));
  model->to(device);
  model->eval();
  const auto data = torch::randn({256, 32}, device);

  const torch::InferenceMode inference;
  const auto full = model->forward(data);
  torch::Tensor mixed;
  {
    torchamp::AutocastGuard autocast(device.type());
    mixed = model->forward(data);
  }
  const double error = (mixed - full).abs().max().item<double>();
  const double largest = full.abs().max().item<double>();
  const auto same_class = mixed.argmax(1).eq(full.argmax(1)).to(torch::kDouble).mean();
  std::cout << "largest output " << largest << ", largest error " << error << '\n';
  support::check(mixed.scalar_type() != torch::kFloat, "the output is in 16 bits");
  support::check(model->parameters()[0].scalar_type() == torch::kFloat,
                 "the weights are what they were");
  support::check(error < 0.03 * largest, "the outputs are those of fp32, to about two digits");
  support::check(same_class.item<double>() > 0.95, "and nearly all choose the same class");
}
