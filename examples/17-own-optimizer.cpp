// SPDX-License-Identifier: BSD-3-Clause
// A custom optimizer that a GradScaler steps without synchronising: it gets the scale and
// the overflow flag as tensors, and decides with torch::where().
#include <torch/torch.h>
#include <torchamp/scaled_step.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "support/check.h"

struct LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.99;

  double get_lr() const override { return lr; }
  void set_lr(const double value) override { lr = value; }
};

struct LionState : torch::optim::OptimizerCloneableParamState<LionState> {
  torch::Tensor momentum;
};

/// Chen et al. 2023: each weight moves by the learning rate, in the direction of its momentum.
class Lion : public torch::optim::Optimizer, public torchamp::ScaledStep {
 public:
  explicit Lion(std::vector<torch::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<LionOptions>()) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    return closure ? closure() : step_scaled({}, {});
  }

  torch::Tensor step_scaled(const torch::Tensor& grad_scale,
                            const torch::Tensor& found_inf) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      const auto& options = static_cast<const LionOptions&>(group.options());
      for (torch::Tensor& parameter : group.params()) {
        torch::Tensor gradient = parameter.grad();
        if (!gradient.defined()) continue;
        if (grad_scale.defined()) gradient = gradient / grad_scale.to(parameter.device());
        auto& state = state_[parameter.unsafeGetTensorImpl()];
        if (!state) {
          state = std::make_unique<LionState>();
          static_cast<LionState&>(*state).momentum = torch::zeros_like(parameter);
        }
        torch::Tensor& momentum = static_cast<LionState&>(*state).momentum;
        const auto stepped =
            parameter - options.lr * momentum.lerp(gradient, 1. - options.beta1).sign();
        replace(parameter, stepped, found_inf);
        replace(momentum, momentum.lerp(gradient, 1. - options.beta2), found_inf);
      }
    }
    return {};
  }

 private:
  /// Writes `value`, unless a gradient held an inf or a NaN. The device decides.
  static void replace(torch::Tensor& at, const torch::Tensor& value,
                      const torch::Tensor& found_inf) {
    if (!found_inf.defined()) {
      at.copy_(value);
    } else {
      at.copy_(torch::where(found_inf.to(at.device()) != 0, at, value));
    }
  }
};

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  torch::nn::Linear model(16, 4);
  model->to(device);
  Lion optimizer(model->parameters());
  torchamp::GradScaler scaler({.init_scale = 1024.});
  const auto data = torch::randn({64, 16}, device);

  for (int i = 0; i < 3; ++i) {
    const auto before = model->weight.detach().clone();
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(device);
      loss = model->forward(data).square().mean();
    }
    if (i == 1) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer);  // the host reads nothing
    scaler.update();

    const double moved = (model->weight - before).abs().max().item<double>();
    std::cout << "the weights moved by " << moved << '\n';
    support::check(result.stepped() == (i != 1), "the bad step is skipped, the others are taken");
    support::check(i == 1 ? moved == 0. : std::abs(moved - 1e-3) < 1e-6,
                   "each weight moves by the learning rate, or not at all");
  }
}
