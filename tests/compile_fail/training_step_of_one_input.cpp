// SPDX-License-Identifier: BSD-3-Clause
// error: pass a function that computes the loss
#include <torchamp/training_step.h>

void step(torchamp::TrainingStep& train, const at::Tensor& x) {
  train(x, [](const auto& inputs) -> at::Tensor { return inputs[0]; });
}
