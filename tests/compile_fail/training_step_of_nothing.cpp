// SPDX-License-Identifier: BSD-3-Clause
// error: the function must return the loss, an at::Tensor
#include <torchamp/training_step.h>

void step(torchamp::TrainingStep& train, at::Tensor& loss) {
  train({loss}, [&](const auto& inputs) { loss = inputs[0]; });
}
