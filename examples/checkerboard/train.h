// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkerboard/network.h"
#include "support/format.h"
#include "support/peak_memory.h"
#include "support/progress_bar.h"
#include "support/step_timer.h"

/// In which precision a network is trained.
struct Precision {
  std::string name;
  at::ScalarType dtype = at::kHalf;
  bool mixed = false;  ///< false: all in fp32
  torchamp::Policy policy = torchamp::Policy::standard();
};

/// What came of a training.
struct Run {
  std::string name;
  std::vector<double> losses{};
  torch::Tensor output{};  ///< of the last step, on the CPU
  double seconds_per_step = 0.;
  std::int64_t peak_bytes = 0;
  double scale = 1.;
  std::int64_t skipped = 0;  ///< steps left out because a gradient was inf or NaN
};

/// Trains a new network, whose weights depend on `seed` alone. Shows its progress if `visible`.
inline Run train(const torch::Tensor& inputs, const torch::Tensor& targets, std::int64_t steps,
                 const Precision& precision, std::int64_t seed, bool visible) {
  const torch::Device device = inputs.device();
  const support::PeakMemory memory(device);
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  auto network = make_network(targets.size(1));
  network->to(device);
  torch::optim::Adam optimizer(network->parameters(), torch::optim::AdamOptions(1e-3));
  torchamp::GradScaler scaler({.enabled = precision.mixed});
  const torchamp::AutocastOptions options{
      .dtype = precision.dtype, .enabled = precision.mixed, .policy = precision.policy};

  std::optional<support::ProgressBar> bar;
  if (visible) bar.emplace(precision.name, steps);
  support::StepTimer timer(device, std::min<std::int64_t>(20, steps / 4));
  Run run{.name = precision.name};
  torch::Tensor outputs, loss;
  std::vector<torch::Tensor> losses;  // stay on the device: reading one would wait for it
  for (std::int64_t step = 1; step <= steps; ++step) {
    optimizer.zero_grad();
    {
      torchamp::AutocastGuard autocast(device.type(), options);
      outputs = network->forward(inputs);
      loss = torch::mse_loss(outputs, targets);
    }
    scaler.scale(loss).backward();
    if (!scaler.step(optimizer)) ++run.skipped;
    scaler.update();

    losses.push_back(loss.detach());
    timer.step();
    if (bar && bar->is_due(step)) {
      bar->show(step, support::format("loss %.4f  scale %g  %s/step", loss.item<double>(),
                                      scaler.get_scale(),
                                      support::format_seconds(timer.seconds_per_step()).c_str()));
    }
  }

  run.seconds_per_step = timer.seconds_per_step();
  const auto values = torch::stack(losses).to(torch::kCPU, torch::kDouble);
  run.losses.assign(values.const_data_ptr<double>(),
                    values.const_data_ptr<double>() + values.numel());
  run.peak_bytes = memory.bytes();
  run.scale = scaler.get_scale();
  run.output = outputs.detach().to(torch::kCPU, torch::kFloat);
  return run;
}
