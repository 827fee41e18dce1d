// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <vector>

/// An exponential moving average of a module's weights and running statistics, as detectors keep
/// it: each real step moves it by 1 - decay, and the decay rises from 0 to 0.9999 over thousands of
/// steps.
class WeightAverage {
 public:
  explicit WeightAverage(const torch::nn::Module& module) {
    for (const auto& tensors : {module.parameters(), module.buffers()}) {
      for (const at::Tensor& tensor : tensors) {
        if (!tensor.is_floating_point()) continue;
        values_.push_back(tensor.detach());
        average_.push_back(tensor.detach().clone());
      }
    }
    steps_ = torch::zeros({}, values_.front().options().dtype(torch::kFloat));
  }

  /// After a step of which the host knows that it was a real one.
  void update() {
    const torch::NoGradGuard no_grad;
    steps_on_host_ += 1.;
    at::_foreach_lerp_(average_, values_, 1. - decay * (1. - std::exp(-steps_on_host_ / ramp)));
  }

  /// After a step that was a real one unless `found_inf` (0-dim, on the device) is non-zero.
  /// Decided there, so that it fits into a CUDA graph.
  void update(const at::Tensor& found_inf) {
    const torch::NoGradGuard no_grad;
    const at::Tensor stepped = found_inf.eq(0.).to(torch::kFloat);
    steps_.add_(stepped);
    const at::Tensor weight = (1. - (1. - (steps_ / -ramp).exp()) * decay) * stepped;
    std::vector<at::Tensor> moves = at::_foreach_sub(values_, average_);
    at::_foreach_mul_(moves, weight);
    at::_foreach_add_(average_, moves);
  }

 private:
  static constexpr double decay = 0.9999, ramp = 2000.;

  std::vector<at::Tensor> values_, average_;
  at::Tensor steps_;
  double steps_on_host_ = 0.;
};
