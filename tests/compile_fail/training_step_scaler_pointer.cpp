// SPDX-License-Identifier: BSD-3-Clause
// error: [.]scaler takes GradScalerOptions, or a GradScaler by its name
#include <torchamp/training_step.h>

torchamp::TrainingStepOptions options(torchamp::GradScaler& scaler) {
  return {.scaler = &scaler};
}
