// SPDX-License-Identifier: BSD-3-Clause
// Gradient accumulation: an Accumulation takes one step with the gradients of four micro-batches.
// With drop_bad it drops a micro-batch whose gradients hold an inf or a NaN, instead of skipping
// the whole step.
#include <torch/torch.h>
#include <torchamp/accumulate.h>
#include <torchamp/torchamp.h>

#include <cstddef>
#include <iostream>
#include <limits>

#include "support/check.h"

namespace {

/// The mean loss of a micro-batch under autocast.
torch::Tensor loss_of(torch::nn::Linear& model, const torch::Tensor& data,
                      const torch::Tensor& target) {
  torchamp::AutocastGuard autocast(data.device());
  return torch::mse_loss(model->forward(data), target);
}

/// Whether two results are equal within the rounding of 16 bits.
bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return torch::allclose(a, b, /*rtol=*/0.02, /*atol=*/1e-3);
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  torch::nn::Linear model(16, 4);
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto data = torch::randn({64, 16}, device).chunk(4);
  const auto target = torch::randn({64, 4}, device).chunk(4);

  // One step on `batch`, to compare with: restores the weights and returns the new ones.
  const auto start = model->weight.detach().clone(), start_bias = model->bias.detach().clone();
  const auto go_back = [&] {
    const torch::NoGradGuard no_grad;
    const auto reached = model->weight.clone();
    model->weight.copy_(start);
    model->bias.copy_(start_bias);
    optimizer.zero_grad();
    return reached;
  };
  const auto step_on = [&](const torch::Tensor& batch, const torch::Tensor& wanted) {
    loss_of(model, batch, wanted).backward();
    optimizer.step();
    return go_back();
  };
  const auto all = step_on(torch::cat(data), torch::cat(target));
  const auto three = step_on(torch::cat({data[0], data[2], data[3]}),
                             torch::cat({target[0], target[2], target[3]}));

  torchamp::GradScaler scaler({.init_scale = 1024.});
  torchamp::Accumulation accumulation(scaler, optimizer, /*micro_batches=*/4);
  for (std::size_t i = 0; i < 4; ++i) {
    const auto result = accumulation.backward(loss_of(model, data[i], target[i]));
    support::check(result.has_value() == (i == 3), "the fourth part takes the step");
  }
  support::check(same(go_back(), all), "the step equals a step with the whole batch");

  const auto ruined = data[1].clone().fill_(std::numeric_limits<float>::infinity());
  torchamp::Accumulation safe(scaler, optimizer, /*micro_batches=*/4, {.drop_bad = true});
  for (std::size_t i = 0; i < 4; ++i) {
    const auto result = safe.backward(loss_of(model, i == 1 ? ruined : data[i], target[i]));
    if (!result) continue;
    std::cout << "kept " << result->kept() << " of " << result->micro_batches() << " parts\n";
    support::check(result->stepped() && result->dropped() == 1, "the ruined part is dropped");
  }
  support::check(same(go_back(), three), "the step equals a step with the other three parts");
  support::check(scaler.get_scale() == 512., "the scale backs off");
}
