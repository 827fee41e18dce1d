// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <cstdint>

/// From two coordinates to `channels` values, each pixel for itself: convolutions of 1 x 1.
inline torch::nn::Sequential make_network(std::int64_t channels) {
  using namespace torch::nn;
  Sequential network;
  for (const std::int64_t inputs : {2, 256, 256}) {
    network->push_back(Conv2d(Conv2dOptions(inputs, 256, 1)));
    network->push_back(BatchNorm2d(256));
    network->push_back(ReLU());
  }
  network->push_back(Conv2d(Conv2dOptions(256, channels, 1)));
  return network;
}
