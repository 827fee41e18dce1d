// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <cstddef>
#include <limits>
#include <vector>

#include "support/devices.h"
#include "support/optimizer_kinds.h"

// What the tests of clipping share.
namespace clipping {

inline constexpr double inf = std::numeric_limits<double>::infinity();
inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// A leaf with the gradient `gradient`.
inline Tensor with_gradient(const Tensor& gradient) {
  Tensor p = torch::zeros(gradient.sizes(), gradient.options().layout(at::kStrided));
  p.requires_grad_().mutable_grad() = gradient;
  return p;
}

/// Leaves with copies of these gradients.
inline Params with_gradients(const std::vector<Tensor>& gradients) {
  Params params;
  for (const Tensor& gradient : gradients) params.push_back(with_gradient(gradient.clone()));
  return params;
}

/// Gives `params` these gradients, times the scale.
inline void backward(torchamp::GradScaler& scaler, Optimizer& optimizer, const Params& params,
                     const std::vector<Tensor>& gradients) {
  optimizer.zero_grad();
  Tensor loss = torch::zeros({}, params[0].options().dtype(at::kFloat).requires_grad(false));
  for (std::size_t i = 0; i < params.size(); ++i) loss = loss + (params[i] * gradients[i]).sum();
  scaler.scale(loss).backward();
}

class ClipGrad : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    torch::manual_seed(2);
  }
  static at::TensorOptions options(at::ScalarType dtype = at::kFloat) {
    return at::TensorOptions(GetParam()).dtype(dtype);
  }
};

}  // namespace clipping
