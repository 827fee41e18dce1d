// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <vector>

#include "support/devices.h"
#include "support/on_device.h"

namespace grad_scaler_on {

/// Where a scaler has its scale, and its rule.
struct Where {
  at::DeviceType device;
  bool rule_on_device;  // from the first scale() on
};

class GradScalerOn : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override { SKIP_WITHOUT(device()); }
  at::DeviceType device() const { return GetParam().device; }
  at::TensorOptions options() const { return at::TensorOptions(device()).dtype(at::kFloat); }
  at::Tensor number(double x) const { return at::full({}, x, options()); }
  at::Tensor tensor(std::vector<float> values) const { return torch::tensor(values).to(device()); }

  void start(torchamp::GradScaler& scaler) const {
    scaler.scale(number(1));
    if (GetParam().rule_on_device && host_knows(scaler)) move_to_device(scaler);
  }

  /// One iteration in which the gradient of `optimizer`'s parameters is `gradient`, unscaled.
  void iterate(torchamp::GradScaler& scaler, torch::optim::Optimizer& optimizer,
               double gradient) const {
    if (!scaler.scale_tensor().defined()) start(scaler);
    at::Tensor loss;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const at::Tensor term = (parameter * gradient).sum();
        loss = loss.defined() ? loss + term : term;
      }
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  }
};

}  // namespace grad_scaler_on
