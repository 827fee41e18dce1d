// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/closure_step.h
#include <torchamp/torchamp.h>

void step(torchamp::GradScaler& scaler, torch::optim::Optimizer& optimizer, const at::Tensor& w) {
  scaler.step(optimizer, [&] { return w.sum(); });
}
