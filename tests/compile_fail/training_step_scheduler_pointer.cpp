// SPDX-License-Identifier: BSD-3-Clause
// error: [.]scheduler takes a scheduler with step.. by its name
#include <torch/optim/schedulers/step_lr.h>
#include <torchamp/training_step.h>

torchamp::TrainingStepOptions options(torch::optim::StepLR& scheduler) {
  return {.scheduler = &scheduler};
}
