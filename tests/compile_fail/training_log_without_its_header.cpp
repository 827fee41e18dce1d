// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/training_log.h
#include <torchamp/training_step.h>

torchamp::TrainingStepOptions options() {
  return {.log = "run.csv"};
}
