// SPDX-License-Identifier: BSD-3-Clause
// Why a loss is scaled: fp16 cannot represent numbers between 0 and 6e-8, and gradients are
// often smaller. Trains a classifier whose loss has a small weight, as one of several losses
// may, in fp32, and in fp16 with and without the scaler. Measures what is lost, in fp32's
// gradients and with a meter in the fp16 runs, and draws it into a PNG file:
//   underflow [FILE.png]
#include <torch/torch.h>
#include <torchamp/labs/underflow_meter.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "support/check.h"
#include "support/drawing/histogram.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/format.h"

namespace {

using torch::nn::Linear;

constexpr std::int64_t rows = 512, classes = 256, steps = 100;
constexpr double weight = 1e-3;                  // of the loss
constexpr std::int64_t lowest = -46, bins = 46;  // powers of two in the histogram

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return last(watched(second(watched(first(x)).relu())).relu());
  }

  /// `y`, whose gradient goes into `gradients` in backward.
  torch::Tensor watched(const torch::Tensor& y) {
    y.register_hook([this](const torch::Tensor& gradient) { gradients.push_back(gradient); });
    return y;
  }

  Linear first = register_module("first", Linear(16, 32));
  Linear second = register_module("second", Linear(32, 32));
  Linear last = register_module("last", Linear(32, classes));
  std::vector<torch::Tensor> gradients;
};
TORCH_MODULE(Net);

struct Run {
  std::vector<double> losses{};
  torch::Tensor magnitudes{};  ///< of all gradients that are not 0
  torchamp::UnderflowReport underflow{};
};

Run train(torch::Device device, bool fp16, bool scaled) {
  torch::manual_seed(0);
  const auto data = torch::randn({rows, 16}, device);
  const auto target = torch::mm(data, torch::randn({16, classes}, device)).argmax(1);
  Net net;
  net->to(device);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-2));
  torchamp::GradScaler scaler({.enabled = scaled});
  torchamp::UnderflowMeter meter(*net, {.every = 25});
  Run run;
  std::vector<torch::Tensor> magnitudes;
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto metered = meter.step(scaler);
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(device, {.dtype = torch::kHalf, .enabled = fp16});
      loss = torch::nn::functional::cross_entropy(net(data), target);
    }
    scaler.scale(loss * weight).backward();
    for (const auto& gradient : std::exchange(net->gradients, {})) {
      magnitudes.push_back(gradient.masked_select(gradient.ne(0.)).to(torch::kFloat).abs());
    }
    scaler.step(optimizer);
    scaler.update();
    run.losses.push_back(loss.item<double>());
  }
  run.underflow = meter.report();
  run.magnitudes = torch::cat(magnitudes).cpu();
  return run;
}

/// The share of `magnitudes` that are 0 in fp16, in per cent.
double lost(const torch::Tensor& magnitudes) {
  return 100. * magnitudes.to(torch::kHalf).eq(0.).to(torch::kFloat).mean().item<double>();
}

/// What a meter found of the gradients of a layer's inputs.
double share(const Run& run, const std::string& layer) {
  for (const auto& row : run.underflow.rows) {
    if (row.module == layer && !row.of_weights) return row.share();
  }
  return 0.;
}

/// The share of `magnitudes` in [2^lowest, 2^(lowest + 1)), and so on, in per cent.
std::vector<double> shares(const torch::Tensor& magnitudes) {
  const auto bin = magnitudes.log2().floor().to(torch::kLong) - lowest;
  const auto counts = bin.clamp(0, bins - 1).bincount({}, bins).to(torch::kDouble);
  const auto percent = counts * (100. / static_cast<double>(magnitudes.numel()));
  return {percent.const_data_ptr<double>(), percent.const_data_ptr<double>() + bins};
}

}  // namespace

int main(int argc, char** argv) {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const Run fp32 = train(device, false, false);
  const Run scaled = train(device, true, true), unscaled = train(device, true, false);
  const double scale = torchamp::GradScalerOptions().init_scale;
  const double before = lost(fp32.magnitudes), after = lost(fp32.magnitudes * scale);
  std::cout << support::format(
      "gradients that are 0 in fp16: %.1f %%, of those times %g: %.1f %%\n"
      "last loss: fp32 %.4f, fp16 with the scaler %.4f, without %.4f\n",
      before, scale, after, fp32.losses.back(), scaled.losses.back(), unscaled.losses.back());
  support::check(before > 40. && after < 1.,
                 "fp16 loses nearly half of the gradients, unless scaled");
  std::cout << "\nnot scaled: " << unscaled.underflow << "\nscaled: " << scaled.underflow << '\n';
  support::check(share(unscaled, "last") > 0.05 && share(scaled, "last") < 0.005,
                 "the meter sees it where it happens: in the layers, scaling helps");
  support::check(std::abs(scaled.losses.back() / fp32.losses.back() - 1.) < 0.1,
                 "with the scaler, fp16 ends at the loss of fp32");
  support::check(!(unscaled.losses.back() < 10. * fp32.losses.back()), "without it, it does not");

  using namespace drawing;
  Canvas canvas(1000, 1040, palette::paper);
  Histogram{.title = "Gradients of activations in fp32",
            .x_label = "magnitude, as a power of two",
            .y_label = "per cent",
            .first = static_cast<double>(lowest),
            .values = shares(fp32.magnitudes),
            .spans = {{"0 in fp16", -46., -25., {250, 214, 206}},
                      {"fewer bits", -25., -14., {252, 238, 200}},
                      {"all of fp16's bits", -14., 0., {219, 240, 221}}}}
      .draw(canvas, {0, 0, 1000, 500});
  LinePlot{.title = "Loss",
           .x_label = "step",
           .y_label = "cross entropy",
           .series =
               {{.label = "fp32", .color = palette::muted, .values = fp32.losses, .line_width = 6.},
                {.label = "fp16, scaled", .color = palette::blue, .values = scaled.losses},
                {.label = "fp16, not scaled", .color = palette::orange, .values = unscaled.losses}},
           .log_y = true,
           .legend_at_left = true}
      .draw(canvas, {0, 520, 1000, 520});
  const char* const file = argc > 1 ? argv[1] : "underflow.png";
  write_png(file, canvas.image());
  std::cout << "see " << file << '\n';
}
