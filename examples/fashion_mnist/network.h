// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

/// Two convolutions and a linear layer, 20 thousand weights.
inline torch::nn::Sequential make_network() {
  using namespace torch::nn;
  return Sequential(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), BatchNorm2d(16), ReLU(),
                    MaxPool2d(2), Conv2d(Conv2dOptions(16, 32, 3).padding(1)), BatchNorm2d(32),
                    ReLU(), MaxPool2d(2), Flatten(), Linear(32 * 7 * 7, 10));
}
