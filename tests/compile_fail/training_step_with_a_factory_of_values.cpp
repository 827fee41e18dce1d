// SPDX-License-Identifier: BSD-3-Clause
// error: a function that creates one and returns a pointer
#include <torchamp/training_step.h>

void make(torch::nn::Module& model) {
  const torchamp::TrainingStep train(
      model, [](auto parameters) { return torchamp::FusedAdamW(parameters); });
}
