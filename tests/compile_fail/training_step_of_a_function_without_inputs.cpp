// SPDX-License-Identifier: BSD-3-Clause
// error: a list of inputs and a function of them
#include <torchamp/training_step.h>

void step(torchamp::TrainingStep& train, const at::Tensor& x) {
  train({x}, [&] { return x; });
}
