// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/distributed/training_group.h
#include <torchamp/distributed/data_parallel.h>
#include <torchamp/training_step.h>

torchamp::TrainingStepOptions options(torchamp::ProcessGroupPtr group) {
  return {.group = group};
}
