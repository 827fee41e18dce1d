// SPDX-License-Identifier: BSD-3-Clause
// A step was skipped. Which gradients overflowed, which op made the first inf, and which parameters
// have no gradient at all?
#include <torch/torch.h>
#include <torchamp/missing_gradients.h>
#include <torchamp/non_finite_op.h>
#include <torchamp/overflow_report.h>
#include <torchamp/torchamp.h>

#include <iostream>

#include "support/check.h"

namespace nn = torch::nn;

struct NetImpl : nn::Module {
  nn::Linear first{nullptr}, last{nullptr}, unused{nullptr};

  NetImpl() {
    first = register_module("first", nn::Linear(8, 8));
    last = register_module("last", nn::Linear(8, 1));
    unused = register_module("unused", nn::Linear(8, 1));
  }

  torch::Tensor forward(const torch::Tensor& x) { return last(first(x).exp()); }
};
TORCH_MODULE(Net);

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  Net model;
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  torchamp::GradScaler scaler({.init_scale = 1024.});
  const auto data = 1000. * torch::randn({16, 8}, device);  // far too large for an exp()

  const auto forward_and_backward = [&] {
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(device);
      loss = model(data).mean();
    }
    scaler.scale(loss).backward();
  };
  forward_and_backward();
  support::check(!scaler.step(optimizer), "the step is skipped");

  const auto report = torchamp::overflow_report(model);
  std::cout << report;
  support::check(!report.empty() && report.gradients == 4, "two layers have gradients, and infs");

  const auto op = torchamp::first_non_finite_op(forward_and_backward, model);  // runs it again
  support::check(op.has_value(), "an op is found");
  std::cout << *op;
  support::check(op->op == "aten::exp" && !op->in_backward, "the op is exp(), in the forward pass");

  const auto missing = torchamp::missing_gradients(optimizer);
  for (const auto& one : missing) std::cout << one << '\n';
  support::check(
      missing.size() == 2 && missing[0].reason == torchamp::MissingGradient::Reason::not_reached,
      "the unused layer has no gradient");
  scaler.update();
}
