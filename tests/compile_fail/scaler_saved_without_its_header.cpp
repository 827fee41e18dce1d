// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/torchamp.h to save and load a GradScaler
#include <torchamp/grad_scaler.h>

void save(const torchamp::GradScaler& scaler, torch::serialize::OutputArchive& archive) {
  scaler.save(archive);
}
