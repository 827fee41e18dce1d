// SPDX-License-Identifier: BSD-3-Clause
// A character-level GPT in mixed precision: a TrainingStep with a fused optimizer, clipping,
// accumulation, several processes, and a checkpoint to resume from. `gpt --help` lists the
// options.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <system_error>
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

namespace {

/// The mean loss on text that was not learnt from.
double held_out_loss(Training& training, const Options& options, const Text& text) {
  auto& train = training.train();
  constexpr int batches = 4;
  double sum = 0.;
  for (int i = 0; i < batches; ++i) {
    const auto batch = text.held_out_batch(options.batch, options.sizes.length).to(train.device());
    sum += train.evaluate([&] { return loss_of(*training.model(), batch).item<double>(); });
  }
  return sum / batches;
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

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw support::UsageError("--out: cannot make the folder '" + folder.string() +
                              "': " + error.message());
  }
}

int run(int argc, char** argv) {
  const std::optional<Options> options = parse_options(argc, argv);
  if (!options) return 0;
  make_folder(options->out);
  const std::string letters = read_text(options->text);
  const Text text(letters, options->sizes.length);
  Processes processes;
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
    std::int64_t parameters = 0;
    for (const auto& parameter : training.model()->parameters()) parameters += parameter.numel();
    std::cout << support::describe(options->device.chosen_device(), options->device.chosen_dtype())
              << support::format("%zu letters, %lld parameters, %d process(es), %s\n",
                                 letters.size(), static_cast<long long>(parameters),
                                 processes.count(), options->precision.c_str());
    if (const auto steps = training.train().steps(); steps > 0) {
      std::cout << "Going on at step " << steps << ".\n";
    }
    std::cout << std::endl;
  }
  training.run();
  if (!speaks) return 0;

  torch::save(training.model(), (options->out / "model.pt").string());
  draw(options->out / "chart.png", training);
  const auto speeds = to_vector(training.speeds());
  std::cout << support::format("\nloss %.4f, on text held out %.4f; %.0f tokens/s in the median\n",
                               training.losses()[-1].item<double>(),
                               held_out_loss(training, *options, text),
                               drawing::running_median(speeds, speeds.size() | 1).front());
  if (options->sample > 0) std::cout << "\n" << sample(training, *options) << '\n';
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("gpt", [&] { return run(argc, argv); });
}
