// SPDX-License-Identifier: BSD-3-Clause
// error: the second argument is the optimizer
#include <torchamp/training_step.h>

void make(torch::nn::Module& model, const std::shared_ptr<torch::optim::Optimizer>& optimizer) {
  const torchamp::TrainingStep train(model, optimizer);
}
