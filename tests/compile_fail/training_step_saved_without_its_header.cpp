// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/training_checkpoint.h
#include <torchamp/training_step.h>

void save(torchamp::TrainingStep& train) {
  train.save("run.pt");
}
