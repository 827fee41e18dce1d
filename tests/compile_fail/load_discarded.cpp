// SPDX-License-Identifier: BSD-3-Clause
// error: ignoring return value.*nodiscard
#include <torchamp/training_checkpoint.h>
#include <torchamp/training_step.h>

void load(torchamp::TrainingStep& train) {
  train.load("run.pt");
}
