// SPDX-License-Identifier: BSD-3-Clause
// A small classifier of clothes, trained on real data with LibTorch's data loader. Mixed
// precision reaches fp32's accuracy; the exit code says whether it does. `fashion_mnist --help`
// lists the options.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>

#include "fashion_mnist/data.h"
#include "fashion_mnist/train.h"
#include "support/arguments.h"
#include "support/device.h"
#include "support/format.h"
#include "support/table.h"
#include "support/trial.h"

namespace {

struct Options {
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::optional<std::int64_t> steps;
  support::DeviceOptions device;
  std::int64_t seed = 0;
  std::int64_t margin = 3;
};

std::optional<Options> parse_options(int argc, char** argv) {
  Options options;
  support::Arguments arguments(
      "fashion_mnist",
      "Trains a small convolutional network on Fashion-MNIST, once in fp32 and once with\n"
      "torchamp's mixed precision, from the same start weights and on the same batches, and\n"
      "compares the accuracy on the test images. Exit code 1 if they differ by too much.");
  arguments.add("--data", "DIR",
                "The folder of the four files, plain or *.gz.\nDefault: " + options.data + ".",
                options.data);
  arguments.add_integer("--steps",
                        "Training steps of 64 images. Default: 600; on a CPU as many,\n"
                        "from 100 to 600, as take about a minute.",
                        options.steps, 1, 1'000'000);
  options.device.add_to(arguments);
  arguments.add_integer("--seed", "Of start weights and batches. Default: 0.", options.seed, 0,
                        INT64_C(0x7fffffff));
  arguments.add_integer("--margin",
                        "By how many points of a hundred the accuracies may differ.\nDefault: 3.",
                        options.margin, 0, 100);
  if (!arguments.parse(argc, argv)) return std::nullopt;
  return options;
}

/// Times a few steps of both kinds.
std::int64_t steps_for_cpu(const FashionMnist& data, Setting setting) {
  constexpr double budget_seconds = 60.;
  setting.steps = 8;
  const support::StepTimes times = support::try_on_cpu([&] {
    return support::StepTimes{train(data, setting, false, "").seconds_per_step,
                              train(data, setting, true, "").seconds_per_step};
  });
  const auto steps = static_cast<std::int64_t>(budget_seconds / times.both()) / 50 * 50;
  return std::clamp<std::int64_t>(steps, 100, 600);
}

int run(int argc, char** argv) {
  const std::optional<Options> options = parse_options(argc, argv);
  if (!options) return 0;
  Setting setting{.device = options->device.chosen_device(),
                  .dtype = options->device.chosen_dtype(),
                  .steps = options->steps.value_or(600),
                  .seed = options->seed};
  const FashionMnist data = read_fashion_mnist(options->data);
  if (setting.device.is_cpu() && !options->steps) setting.steps = steps_for_cpu(data, setting);
  std::cout << support::describe(setting.device, setting.dtype)
            << support::format("Fashion-MNIST: %lld steps of 64 images\n\n",
                               static_cast<long long>(setting.steps))
            << std::flush;

  const std::string name = support::short_name(setting.dtype);
  const Run fp32 = train(data, setting, false, "fp32");
  const Run amp = train(data, setting, true, name);

  using support::format;
  support::Table table({"", "fp32", name});
  table.add({"test accuracy", format("%.2f %%", fp32.accuracy), format("%.2f %%", amp.accuracy)});
  table.add({"loss, last step", format("%.3f", fp32.loss), format("%.3f", amp.loss)});
  table.add({"time per step", support::format_seconds(fp32.seconds_per_step),
             support::format_seconds(amp.seconds_per_step)});
  std::cout << '\n' << table << '\n';

  const double difference = std::abs(fp32.accuracy - amp.accuracy);
  const bool agree = difference <= static_cast<double>(options->margin);  // false for a NaN too
  std::cout << format("The accuracies differ by %.2f points, %s the margin of %lld.\n", difference,
                      agree ? "within" : "MORE THAN", static_cast<long long>(options->margin));
  return agree ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("fashion_mnist", [&] { return run(argc, argv); });
}
