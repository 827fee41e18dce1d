// SPDX-License-Identifier: BSD-3-Clause
// Two trips through the core, for .ci/trips: each lies in a function of its own.
#include <torch/torch.h>

#include "torchamp/torchamp.h"

namespace {

/// A product in the state before, so that what a process does once is done.
torch::Tensor product(const torch::Tensor& a, const torch::Tensor& b) {
  return torch::matmul(a, b);
}

}  // namespace

/// From a policy's edit to a cast in `matmul`.
[[gnu::noinline]] torch::Tensor trip_from_edit_to_cast(const torch::Tensor& a,
                                                       const torch::Tensor& b) {
  const torchamp::AutocastGuard autocast(
      torch::kCPU, {.policy = torchamp::Policy::standard().lower_precision("matmul")});
  return product(a, b);
}

/// From a loss to the next iteration's scale, with a fused optimizer.
[[gnu::noinline]] void trip_from_loss_to_update(const torch::Tensor& loss,
                                                torchamp::FusedAdamW& optimizer,
                                                torchamp::GradScaler& scaler) {
  scaler.scale(loss).backward();
  scaler.step(optimizer);
  scaler.update();
}

int main() {
  const torch::Tensor a = torch::ones({4, 4}), b = torch::ones({4, 4});
  torch::nn::Linear model(4, 1);
  torchamp::FusedAdamW optimizer(model->parameters());
  torchamp::GradScaler scaler;
  for (int i = 0; i < 3; ++i) {
    trip_from_edit_to_cast(a, b);
    optimizer.zero_grad();
    trip_from_loss_to_update(model->forward(a).sum(), optimizer, scaler);
  }
}
