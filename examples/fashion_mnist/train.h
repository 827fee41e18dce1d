// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "fashion_mnist/data.h"
#include "fashion_mnist/network.h"
#include "support/format.h"
#include "support/peak_memory.h"
#include "support/progress_bar.h"
#include "support/step_timer.h"

/// How a network is trained.
struct Setting {
  torch::Device device = torch::kCPU;
  at::ScalarType dtype = at::kFloat;  ///< fp32: without autocast; fp16: with a loss scale
  std::int64_t steps = 0;
  std::int64_t seed = 0;
};

/// The result of a training.
struct Run {
  std::vector<double> losses;     ///< of each step
  double accuracy = 0.;           ///< on the test images, in per cent
  double seconds_per_step = 0.;   ///< by the clock
  double processor_seconds = 0.;  ///< that the host computed in all steps together
  std::int64_t peak_bytes = 0;    ///< of tensors during the steps, without the data set
};

/// The share of the test images whose class the network finds, in per cent.
inline double test_accuracy(torch::nn::Sequential& network,
                            const torch::data::datasets::MNIST& data, torch::Device device,
                            const torchamp::AutocastOptions& options) {
  const torch::InferenceMode inference;
  network->eval();
  const std::int64_t count = data.images().size(0);
  std::int64_t right = 0;
  for (std::int64_t first = 0; first < count; first += 500) {
    const auto images = data.images().narrow(0, first, std::min<std::int64_t>(500, count - first));
    const auto classes = data.targets().narrow(0, first, images.size(0)).to(device);
    const torchamp::AutocastGuard autocast(device.type(), options);
    const auto found = network->forward(images.to(device)).argmax(1);
    right += found.eq(classes).sum().item<std::int64_t>();
  }
  return 100. * static_cast<double>(right) / static_cast<double>(count);
}

/// Trains a new network and tests it; shows its progress under `title`. Initial weights and batches
/// depend on the seed alone.
inline Run train(const FashionMnist& data, const Setting& setting, const std::string& title) {
  const torch::Device device = setting.device;
  const std::int64_t bytes_before = support::PeakMemory(device).bytes();
  const support::PeakMemory memory(device);
  torch::manual_seed(static_cast<std::uint64_t>(setting.seed));
  auto network = make_network();
  network->to(device);
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      torch::data::datasets::MNIST(data.train).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions().batch_size(64).drop_last(true));

  constexpr double learning_rate = 2e-3;  // at the start; falls evenly to 0
  torchamp::FusedAdam optimizer(network->parameters(), torch::optim::AdamOptions(learning_rate));
  torchamp::GradScaler scaler({.enabled = setting.dtype == at::kHalf});
  torchamp::AutocastOptions options{.enabled = false};
  if (setting.dtype != at::kFloat) options = {.dtype = setting.dtype};

  support::ProgressBar bar(title, setting.steps);
  support::StepTimer timer(device, std::min<std::int64_t>(20, setting.steps / 4));
  const std::clock_t start = std::clock();
  std::vector<torch::Tensor> losses;  // stay on the device: reading one waits for it
  while (static_cast<std::int64_t>(losses.size()) < setting.steps) {
    for (auto& batch : *loader) {
      const double done = static_cast<double>(losses.size()) / static_cast<double>(setting.steps);
      for (auto& group : optimizer.param_groups()) {
        group.options().set_lr(learning_rate * (1. - done));
      }
      const auto images = batch.data.to(device), classes = batch.target.to(device);
      torch::Tensor loss;
      optimizer.zero_grad();
      {
        const torchamp::AutocastGuard autocast(device.type(), options);
        loss = torch::nn::functional::cross_entropy(network->forward(images), classes);
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
      losses.push_back(loss.detach());

      timer.step();
      const auto step = static_cast<std::int64_t>(losses.size());
      if (bar.is_due(step)) {
        bar.show(step, support::format("loss %.3f  scale %g  %s/step", loss.item<double>(),
                                       scaler.get_scale(),
                                       support::format_seconds(timer.seconds_per_step()).c_str()));
      }
      if (step == setting.steps) break;
    }
  }
  Run run;
  const auto values = torch::stack(losses).to(torch::kCPU, torch::kDouble);
  run.processor_seconds =
      static_cast<double>(std::clock() - start) / static_cast<double>(CLOCKS_PER_SEC);
  run.seconds_per_step = timer.seconds_per_step();
  run.peak_bytes = memory.bytes() - bytes_before;
  run.losses.assign(values.const_data_ptr<double>(),
                    values.const_data_ptr<double>() + values.numel());
  run.accuracy = test_accuracy(network, data.test, device, options);
  return run;
}
