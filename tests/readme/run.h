// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// What the code blocks of the guide that are run see: the names of prelude.h, with values.

#include <iostream>
#include <limits>
#include <thread>

#include "readme/prelude.h"

namespace readme {

torch::nn::Sequential model(nullptr);
std::vector<Batch>* loader;
Batch batch;
torch::Tensor x, y, w, input, target, output, loss;

// Runs a block with a new model and new data.
inline void run(const char* name, void (*block)()) {
  std::cout << name << std::endl;
  torch::manual_seed(0);
  model = torch::nn::Sequential(torch::nn::Linear(16, 16), torch::nn::ReLU(),
                                torch::nn::Linear(16, 16));
  x = input = torch::rand({4, 16});
  y = target = torch::rand({4, 16});
  w = torch::rand({16, 16});
  batch = {x, y};
  std::vector<Batch> batches(6, batch);
  loader = &batches;
  block();
}

}  // namespace readme

using readme::run;
