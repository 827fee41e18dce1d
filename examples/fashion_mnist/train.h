// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "fashion_mnist/data.h"
#include "fashion_mnist/network.h"
#include "support/format.h"
#include "support/progress_bar.h"
#include "support/step_timer.h"

/// What both runs share.
struct Setting {
  torch::Device device = torch::kCPU;
  at::ScalarType dtype = at::kBFloat16;
  std::int64_t steps = 0;
  std::int64_t seed = 0;
};

/// What came of a training.
struct Run {
  double loss = 0.;      ///< of the last step
  double accuracy = 0.;  ///< on the test images, in per cent
  double seconds_per_step = 0.;
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

/// Trains a new network; start weights and batches depend on the seed alone. Shows its progress
/// under `title` and tests the network, or does neither if the title is empty.
inline Run train(const FashionMnist& data, const Setting& setting, bool mixed,
                 const std::string& title) {
  const torch::Device device = setting.device;
  torch::manual_seed(static_cast<std::uint64_t>(setting.seed));
  auto network = make_network();
  network->to(device);
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      torch::data::datasets::MNIST(data.train).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions().batch_size(64).drop_last(true));

  constexpr double learning_rate = 2e-3;  // at the start; falls evenly to 0
  torch::optim::Adam optimizer(network->parameters(), torch::optim::AdamOptions(learning_rate));
  torchamp::GradScaler scaler({.enabled = mixed});
  const torchamp::AutocastOptions options{.dtype = setting.dtype, .enabled = mixed};

  std::optional<support::ProgressBar> bar;
  if (!title.empty()) bar.emplace(title, setting.steps);
  support::StepTimer timer(device, std::min<std::int64_t>(20, setting.steps / 4));
  Run run;
  torch::Tensor loss;
  std::int64_t step = 0;
  while (step < setting.steps) {
    for (auto& batch : *loader) {
      const double done = static_cast<double>(step) / static_cast<double>(setting.steps);
      for (auto& group : optimizer.param_groups()) {
        group.options().set_lr(learning_rate * (1. - done));
      }
      const auto images = batch.data.to(device), classes = batch.target.to(device);
      optimizer.zero_grad();
      {
        torchamp::AutocastGuard autocast(device.type(), options);
        loss = torch::nn::functional::cross_entropy(network->forward(images), classes);
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();

      ++step;
      timer.step();
      if (bar && bar->is_due(step)) {
        bar->show(step, support::format("loss %.3f  scale %g  %s/step", loss.item<double>(),
                                        scaler.get_scale(),
                                        support::format_seconds(timer.seconds_per_step()).c_str()));
      }
      if (step == setting.steps) break;
    }
  }
  run.loss = loss.item<double>();
  run.seconds_per_step = timer.seconds_per_step();
  if (bar) run.accuracy = test_accuracy(network, data.test, device, options);
  return run;
}
