// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Names that the code blocks of the README and the guide use. Declared
// only; the blocks are compiled, not run.

#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <string>
#include <vector>

namespace readme {

struct Batch {
  torch::Tensor data, target;
};

extern torch::nn::Sequential model;
extern std::vector<Batch>* loader;
extern Batch batch;
extern torch::Tensor x, y, w, input, target, output, loss;

}  // namespace readme
