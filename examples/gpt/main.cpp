// SPDX-License-Identifier: BSD-3-Clause
// A character-level GPT in mixed precision: a TrainingStep with a fused optimizer, clipping,
// accumulation, several processes, and a checkpoint to resume from. `gpt --help` lists the
// options.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/processes.h"
#include "gpt/text.h"
#include "gpt/training.h"
#include "support/arguments.h"
#include "support/device.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/format.h"
#include "support/make_folder.h"

namespace {

/// The mean loss on text that was not learnt from.
double held_out_loss(Training& training, const Options& options, const Text& text) {
  auto& train = training.train();
  const auto parts = text.held_out(/*most=*/512, options.sizes.length);
  double sum = 0.;
  for (const auto& batch : parts.split(options.batch)) {
    sum += static_cast<double>(batch.size(0)) * train.evaluate([&] {
      return loss_of(*training.model(), batch.to(train.device())).item<double>();
    });
  }
  return sum / static_cast<double>(parts.size(0));
}

/// Lets the model write, after the end of a line.
std::string sample(Training& training, const Options& options) {
  constexpr double temperature = 0.8;
  auto& train = training.train();
  auto text = torch::full({1, 1}, '\n', torch::dtype(torch::kLong).device(train.device()));
  for (std::int64_t i = 0; i < options.sample; ++i) {
    const auto seen = text.narrow(1, std::max<std::int64_t>(0, text.size(1) - options.sizes.length),
                                  std::min(text.size(1), options.sizes.length));
    const auto logits = train.evaluate(
        [&] { return training.model()->forward(seen).select(1, -1).to(torch::kFloat); });
    const auto next = torch::softmax(logits / temperature, -1).multinomial(1);
    text = torch::cat({text, next}, 1);
  }
  const auto letters = text.flatten().to(torch::kCPU, torch::kByte);
  const auto* const first = letters.const_data_ptr<std::uint8_t>();
  return std::string(first + 1, first + letters.numel());
}

std::vector<double> to_vector(const torch::Tensor& values) {
  const auto doubles = values.to(torch::kDouble);
  return {doubles.const_data_ptr<double>(), doubles.const_data_ptr<double>() + doubles.numel()};
}

/// Loss and speed of each step.
void draw(const std::filesystem::path& path, const Training& training) {
  using namespace drawing;
  Canvas canvas(1000, 1000, palette::paper);
  const auto losses = to_vector(training.losses());
  LinePlot{
      .title = "Loss",
      .x_label = "step",
      .y_label = "cross entropy of a letter",
      .series = {{.color = palette::blue, .values = losses, .line_width = 1.2, .opacity = 0.35},
                 {.color = palette::blue, .values = running_median(losses, 21)}}}
      .draw(canvas, {0, 0, 1000, 500});
  LinePlot{.title = "Speed",
           .note = "more is better",
           .x_label = "step",
           .y_label = "tokens a second",
           .series = {{.color = palette::green, .values = to_vector(training.speeds())}}}
      .draw(canvas, {0, 500, 1000, 500});
  write_png(path, canvas.image());
  std::cout << "Wrote " << path.string() << '\n';
}

void print_about(Training& training, const Options& options, const Processes& processes) {
  std::int64_t parameters = 0;
  for (const auto& parameter : training.model()->parameters()) parameters += parameter.numel();
  std::cout << support::describe(options.device.chosen_device(), options.device.chosen_dtype())
            << support::format("%lld parameters, %d process(es), %s\n",
                               static_cast<long long>(parameters), processes.count(),
                               options.precision.c_str());
  if (const auto steps = training.train().steps(); steps > 0) {
    std::cout << "Going on at step " << steps << ".\n";
  }
  std::cout << std::endl;
}

/// Trains to the end, writes the model and a chart, and prints the losses and a sample.
/// Returns the loss on the held-out text.
double train(Training& training, const Options& options, const Text& text) {
  training.run();
  torch::save(training.model(), (options.out / "model.pt").string());
  draw(options.out / "chart.png", training);
  const auto speeds = to_vector(training.speeds());
  const double held_out = held_out_loss(training, options, text);
  std::cout << support::format("\nloss %.4f, on text held out %.4f; %.0f tokens/s in the median\n",
                               training.losses()[-1].item<double>(), held_out,
                               drawing::running_median(speeds, speeds.size() | 1).front());
  if (options.sample > 0) std::cout << "\n" << sample(training, options) << "\n";
  std::cout << std::endl;
  return held_out;
}

/// Trains in fp32, bf16 and fp16, from the same initial weights and on the same batches. Writes
/// losses.csv and losses.png. Returns whether the held-out losses agree.
bool compare(const Options& options, const Text& text, Processes& processes) {
  using namespace drawing;
  LinePlot plot{.title = "GPT",
                .note = "running median of 21 steps",
                .x_label = "step",
                .y_label = "training loss of a letter"};
  std::ofstream csv(options.out / "losses.csv");
  csv << "dtype,steps,held_out_loss,processor_seconds\n";
  double fp32 = 0.;
  bool agree = true;
  for (const auto& [name, color] :
       {std::pair("fp32", palette::ink), std::pair("bf16", palette::blue),
        std::pair("fp16", palette::orange)}) {
    Options one = options;
    const bool is_fp32 = name == std::string("fp32");
    one.precision = is_fp32 ? "fp32" : "mixed";
    if (!is_fp32) one.device.dtype = name;
    one.out = options.out / name;
    support::make_folder(one.out);
    Training training(one, text, processes);
    print_about(training, one, processes);
    const double held_out = train(training, one, text);
    csv << support::format("%s,%lld,%.4f,%.2f\n", name, static_cast<long long>(options.steps),
                           held_out, training.processor_seconds());
    plot.series.push_back({.label = name,
                           .color = color,
                           .values = running_median(to_vector(training.losses()), 21)});
    if (is_fp32) fp32 = held_out;
    const bool is_near = std::abs(held_out - fp32) <= 0.05 * fp32;
    if (!is_near) std::cout << name << ": the held-out loss differs from fp32's by over 5 %\n";
    agree = agree && is_near;
  }
  if (!csv.flush()) throw support::UsageError("--out: cannot write losses.csv");
  Canvas canvas(1000, 560, palette::paper);
  plot.draw(canvas, {0, 0, 1000, 560});
  write_png(options.out / "losses.png", canvas.image());
  return agree;
}

int run(int argc, char** argv) {
  const std::optional<Options> options = parse_options(argc, argv);
  if (!options) return 0;
  support::make_folder(options->out);
  const Text text(read_text(options->text), options->sizes.length);
  Processes processes;
  if (options->all_dtypes()) {
    if (processes.count() > 1) throw support::UsageError("--precision all: runs in one process");
    return compare(*options, text, processes) ? 0 : 1;
  }
  Training training(*options, text, processes);
  const bool speaks = processes.rank() == 0;
  if (!options->audit.empty()) {
    if (!speaks) return 0;
    const torchamp::AuditedPolicy chosen = training.audit();
    torchamp::save_policy(chosen, options->audit);
    std::cout << chosen << "Wrote " << options->audit << '\n';
    return 0;
  }
  if (speaks) {
    print_about(training, *options, processes);
    train(training, *options, text);
  } else {
    training.run();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("gpt", [&] { return run(argc, argv); });
}
