// SPDX-License-Identifier: BSD-3-Clause
// error: the function must return the loss, an at::Tensor
#include <torchamp/training_step.h>

void step(torchamp::TrainingStep& train, const at::Tensor& loss) {
  train([&] { return loss.item<double>(); });
}
