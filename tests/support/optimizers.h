// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/optim.h>
#include <torchamp/scaled_step.h>

#include <torch/optim/sgd.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

/// `w -= lr * gradient` on the device, taken or not by a select: the plainest optimizer that
/// implements torchamp::ScaledStep.
class PlainScaledSGD : public torch::optim::SGD, public torchamp::ScaledStep {
 public:
  using torch::optim::SGD::SGD;

  at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override {
    const torch::NoGradGuard no_grad;
    ++scaled_steps;
    given_scale = grad_scale;
    given_found_inf = found_inf.defined() ? found_inf.clone() : found_inf;
    for (auto& group : param_groups()) {
      const double lr = group.options().get_lr();
      for (at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        at::Tensor gradient = parameter.grad().to(parameter.scalar_type());
        if (grad_scale.defined()) gradient = gradient / grad_scale.to(parameter.device());
        const at::Tensor stepped = parameter - lr * gradient;
        parameter.copy_(found_inf.defined()
                            ? at::where(found_inf.to(parameter.device()) != 0, parameter, stepped)
                            : stepped);
      }
    }
    return {};
  }

  int scaled_steps = 0;
  at::Tensor given_scale, given_found_inf;
};

/// The same, but its step throws while `fails` is set.
struct FailingScaledSgd : PlainScaledSGD {
  using PlainScaledSGD::PlainScaledSGD;
  at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override {
    if (fails) throw std::runtime_error("out of luck");
    return PlainScaledSGD::step_scaled(grad_scale, found_inf);
  }
  bool fails = true;
};

/// SGD whose step throws on request.
struct FailingSgd : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (fails) throw std::runtime_error("out of luck");
    return SGD::step(closure);
  }
  bool fails = true;
};

/// A leaf with the gradient `gradient`.
inline at::Tensor parameter_with(const at::Tensor& gradient) {
  at::Tensor parameter = at::zeros(gradient.sizes(), gradient.options().layout(at::kStrided));
  parameter.requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}

inline torch::optim::SGD sgd(std::vector<at::Tensor> parameters, double lr = 1.) {
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(lr));
}

/// LibTorch's SGD, or torchamp's.
inline std::unique_ptr<torch::optim::Optimizer> plain_or_fused_sgd(
    std::vector<at::Tensor> parameters, bool fused, double lr = 1.) {
  const torch::optim::SGDOptions options(lr);
  if (fused) return std::make_unique<torchamp::FusedSGD>(std::move(parameters), options);
  return std::make_unique<torch::optim::SGD>(std::move(parameters), options);
}
