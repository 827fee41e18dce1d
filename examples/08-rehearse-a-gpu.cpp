// SPDX-License-Identifier: BSD-3-Clause
// A training in fp16 with a loss scale on any CPU, as a rehearsal for a GPU: values overflow,
// underflow and are rounded as on a GPU.
#include <torch/torch.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_step.h>

#include <iostream>

#include "support/check.h"

/// The gradient of a weight of 1, for a loss of `factor` times the weight.
double gradient(double factor, double scale) {
  const auto weight = torch::ones({1, 1}).requires_grad_();
  torch::Tensor loss;
  {
    torchamp::AutocastGuard autocast(torch::kCPU, torch::kHalf);
    loss = torch::mm(torch::ones({1, 1}), weight).to(torch::kFloat).sum() * factor;
  }
  (loss * scale).backward();
  return weight.grad().item<double>() / scale;
}

int main() {
  torch::manual_seed(0);
  std::cout << "fp16 products run in "
            << (torchamp::cpu_products(torch::kHalf) == torchamp::CpuProducts::fp32
                    ? "fp32 on this CPU, with results in fp16\n"
                    : "fp16 on this CPU\n");

  // Underflow: a gradient below 6e-8 is 0 in fp16. A loss scale keeps it.
  support::check(gradient(1e-8, 1.) == 0., "a small gradient is lost without a scale");
  const double kept = gradient(1e-8, 65536.);
  support::check(kept > 0.99e-8 && kept < 1.01e-8, "a scale keeps it");

  // Overflow: a product above 65504 is inf, though its sum in fp32 is finite.
  {
    torchamp::AutocastGuard autocast(torch::kCPU, torch::kHalf);
    const auto product = torch::mm(torch::full({1, 1000}, 9.), torch::full({1000, 1}, 9.));
    support::check(product.isinf().item<bool>(), "81000 is beyond fp16");
  }

  // Training: the scale starts far too high. The scaler skips steps until the scale fits.
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 1));
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  torchamp::TrainingStep train(
      model, optimizer,
      {.dtype = torch::kHalf, .scaler = torchamp::GradScalerOptions{.init_scale = 0x1p24}});
  const auto data = torch::rand({256, 8}), target = data.sin().sum(1, /*keepdim=*/true);
  double first = 0., last = 0.;
  int skipped = 0;
  for (int i = 0; i < 150; ++i) {
    const auto result = train([&] { return torch::mse_loss(model->forward(data), target); });
    last = result.loss();
    if (i == 0) first = last;
    if (!result) ++skipped;
  }
  std::cout << skipped << " steps skipped, scale " << train.scaler().get_scale() << ", loss "
            << last << '\n';
  support::check(skipped > 0, "the first steps overflow");
  support::check(train.scaler().get_scale() < 0x1p24, "the scale has fallen");
  support::check(last < first / 20., "the loss has fallen to less than a twentieth");
}
