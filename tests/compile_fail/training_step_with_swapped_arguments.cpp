// SPDX-License-Identifier: BSD-3-Clause
// error: the first argument is the model .*the second the optimizer
#include <torchamp/training_step.h>

void make(torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
  const torchamp::TrainingStep train(optimizer, model, {.max_grad_norm = 1.});
}
