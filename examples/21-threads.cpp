// SPDX-License-Identifier: BSD-3-Clause
// A guard affects its own thread. AutocastState copies its state to another thread.
#include <torch/torch.h>
#include <torchamp/autocast_state.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <thread>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Linear model(16, 4);
  model->to(device);
  const auto data = torch::randn({8, 16}, device);

  torchamp::AutocastGuard autocast(device, torch::kBFloat16);
  const auto state = torchamp::AutocastState::of_this_thread();
  support::check(state.is_enabled(device) && state.dtype(device) == torch::kBFloat16,
                 "the state says what the guard has set");

  torch::Tensor alone, carried;
  std::thread worker([&, state] {
    const torch::NoGradGuard no_grad;
    alone = model->forward(data);
    torchamp::AutocastStateGuard same(state);
    carried = model->forward(data);
  });
  worker.join();
  std::cout << "the thread computes in " << alone.scalar_type() << ", under the state in "
            << carried.scalar_type() << '\n';
  support::check(alone.scalar_type() == torch::kFloat, "a new thread knows nothing of the guard");
  support::check(carried.scalar_type() == torch::kBFloat16, "under the state it does as this one");
}
