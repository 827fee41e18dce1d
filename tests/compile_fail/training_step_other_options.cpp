// SPDX-License-Identifier: BSD-3-Clause
// error: [.]masters takes.*[.]group takes.*[.]capture takes.*[.]log takes
#include <torchamp/training_step.h>

torchamp::TrainingStepOptions options() {
  return {.masters = true, .group = 4, .capture = true, .log = 3};
}
