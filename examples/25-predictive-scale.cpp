// SPDX-License-Identifier: BSD-3-Clause
// The scale of one run under three update rules, with gradients that grow 1000-fold for 50 of
// every 500 steps. torch.amp and Megatron-LM lower the scale until nothing overflows, and raise
// it long after; GradScalerOptions::predictive() follows the gradients. Draws the scales into a
// PNG file:
//   25-predictive-scale [FILE.png]
#include <torch/torch.h>
#include <torchamp/predictive_scale.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "support/check.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/format.h"

namespace {

namespace nn = torch::nn;

constexpr std::int64_t steps = 2000, rows = 16, width = 16;

struct Run {
  std::string name;
  drawing::Series scale;
  std::int64_t skipped = 0, skipped_at_first = 0;
};

Run train(std::string name, drawing::Color color, const torchamp::GradScalerOptions& options) {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(1);
  nn::Sequential model(nn::Linear(width, width), nn::ReLU(), nn::Linear(width, 1));
  model->to(device);
  torchamp::FusedSGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-7));
  torchamp::GradScaler scaler(options);
  Run run{std::move(name), {.color = color}};
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto data = torch::randn({rows, width}, device), target = torch::randn({rows, 1}, device);
    const double weight = step % 500 >= 450 ? 1000. : 1.;
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(device, torch::kHalf);
      loss = weight * torch::mse_loss(model->forward(data), target);
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    run.scale.values.push_back(scaler.get_scale());
    const bool skipped = !scaler.step(optimizer);
    run.skipped += skipped;
    run.skipped_at_first += skipped && step < 100;
    scaler.update();
  }
  run.scale.label =
      support::format("%s: %d steps skipped", run.name.c_str(), static_cast<int>(run.skipped));
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  using torchamp::GradScalerOptions;
  const Run torchs = train("torch.amp", drawing::palette::muted, GradScalerOptions::torch());
  const Run megatron = train("Megatron-LM", drawing::palette::blue, GradScalerOptions::megatron());
  GradScalerOptions far_too_large = GradScalerOptions::predictive();
  far_too_large.init_scale = megatron.scale.values.front();
  const Run ours = train("predictive", drawing::palette::orange, far_too_large);

  std::cout << "steps skipped   of the first 100   of all\n";
  for (const Run* run : {&torchs, &megatron, &ours}) {
    std::cout << support::format("%-14s %18d %8d\n", run->name.c_str(),
                                 static_cast<int>(run->skipped_at_first),
                                 static_cast<int>(run->skipped));
  }
  support::check(ours.skipped_at_first <= 1, "a scale of 2^32 costs the new update a step at most");
  support::check(4 * ours.skipped <= torchs.skipped, "bursts cost a quarter of torch.amp's skips");
  support::check(4 * ours.skipped <= megatron.skipped, "and of Megatron-LM's");

  drawing::Canvas canvas(1000, 620, drawing::palette::paper);
  drawing::LinePlot{.title = "The scale, where gradients grow 1000-fold for 50 steps in 500",
                    .x_label = "step",
                    .y_label = "scale",
                    .series = {torchs.scale, megatron.scale, ours.scale},
                    .log_y = true}
      .draw(canvas, {0, 0, 1000, 620});
  const char* const file = argc > 1 ? argv[1] : "25-predictive-scale.png";
  drawing::write_png(file, canvas.image());
  std::cout << "see " << file << '\n';
}
