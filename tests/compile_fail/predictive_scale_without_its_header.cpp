// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/predictive_scale.h
#include <torchamp/torchamp.h>

torchamp::GradScalerOptions options() {
  return torchamp::GradScalerOptions::predictive();
}
