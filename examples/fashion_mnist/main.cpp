// SPDX-License-Identifier: BSD-3-Clause
// A small classifier of clothes, trained on real data with LibTorch's data loader in fp32, bf16 and
// fp16, from several seeds. The 16-bit dtypes reach fp32's accuracy; the exit code says whether
// they do. `fashion_mnist --help` lists the options.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "fashion_mnist/data.h"
#include "fashion_mnist/train.h"
#include "support/arguments.h"
#include "support/device.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/format.h"
#include "support/make_folder.h"
#include "support/peak_memory.h"
#include "support/table.h"

namespace {

struct Options {
  std::string data = "/usr/share/datasets/fashion-mnist", out = "torchamp-fashion-mnist";
  std::int64_t steps = 600, seeds = 1, margin = 3;
  support::DeviceOptions device;
};

std::optional<Options> parse_options(int argc, char** argv) {
  Options options;
  support::Arguments arguments(
      "fashion_mnist",
      "Trains a small convolutional network on Fashion-MNIST in fp32, bf16 and fp16, with the\n"
      "same initial weights and batches, and compares the accuracy on the test images. Exit\n"
      "code 1 if the mean accuracy of a 16-bit dtype differs from fp32's by too much.");
  arguments.add("--data", "DIR",
                "The folder of the four files, plain or *.gz.\nDefault: " + options.data + ".",
                options.data);
  arguments.add_integer("--steps", "Training steps of 64 images; 937 are an epoch. Default: 600.",
                        options.steps, 1, 1'000'000);
  arguments.add_integer("--seeds", "How many runs in each dtype. Default: 1.", options.seeds, 1,
                        1000);
  arguments.add_choice("--device", {"auto", "cpu", "cuda"},
                       "Default: CUDA if there is a CUDA device.", options.device.device);
  arguments.add_integer("--margin",
                        "By how many points of a hundred the accuracies may differ.\nDefault: 3.",
                        options.margin, 0, 100);
  arguments.add("--out", "DIR", "Where runs.csv and losses.png go. Default: " + options.out + ".",
                options.out);
  if (!arguments.parse(argc, argv)) return std::nullopt;
  return options;
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.) / static_cast<double>(values.size());
}

/// All runs in one dtype.
struct Runs {
  at::ScalarType dtype;
  drawing::Color color;
  std::vector<Run> runs{};

  std::string name() const { return support::short_name(dtype); }

  template <class Value>
  std::vector<double> all(Value Run::*member) const {
    std::vector<double> values;
    for (const Run& run : runs) values.push_back(static_cast<double>(run.*member));
    return values;
  }

  /// The loss of each step: the mean over the seeds.
  std::vector<double> losses() const {
    std::vector<double> means(runs.front().losses.size());
    for (std::size_t step = 0; step < means.size(); ++step) {
      for (const Run& run : runs) {
        means[step] += run.losses[step] / static_cast<double>(runs.size());
      }
    }
    return means;
  }
};

void write_csv(const std::filesystem::path& path, const std::vector<Runs>& dtypes,
               std::int64_t steps) {
  std::ofstream file(path);
  file << "dtype,seed,steps,test_accuracy,seconds_per_step,processor_seconds,peak_bytes\n";
  for (const Runs& one : dtypes) {
    for (std::size_t seed = 0; seed < one.runs.size(); ++seed) {
      const Run& run = one.runs[seed];
      file << support::format("%s,seed %zu,%lld,%.2f,%.6f,%.2f,%lld\n", one.name().c_str(), seed,
                              static_cast<long long>(steps), run.accuracy, run.seconds_per_step,
                              run.processor_seconds, static_cast<long long>(run.peak_bytes));
    }
  }
  if (!file.flush()) throw support::UsageError("--out: cannot write '" + path.string() + "'");
}

void draw(const std::filesystem::path& path, const std::vector<Runs>& dtypes) {
  drawing::Canvas canvas(1000, 560, drawing::palette::paper);
  drawing::LinePlot plot{.title = "Fashion-MNIST",
                         .note = "mean over the seeds, running median of 51 steps",
                         .x_label = "step",
                         .y_label = "training loss",
                         .log_y = true};
  for (const Runs& one : dtypes) {
    plot.series.push_back({.label = one.name(),
                           .color = one.color,
                           .values = drawing::running_median(one.losses(), 51)});
  }
  plot.draw(canvas, {0, 0, 1000, 560});
  drawing::write_png(path, canvas.image());
}

/// A column for each dtype.
support::Table table_of(const std::vector<Runs>& dtypes) {
  using support::format;
  std::vector<std::string> head{""}, mean{"test accuracy, mean"}, range{"least to most"};
  std::vector<std::string> time{"time per step"}, processor{"processor time per run"};
  std::vector<std::string> memory{"peak memory of tensors"};
  for (const Runs& one : dtypes) {
    const auto accuracies = one.all(&Run::accuracy);
    const auto [least, most] = std::minmax_element(accuracies.begin(), accuracies.end());
    head.push_back(one.name());
    mean.push_back(format("%.2f %%", mean_of(accuracies)));
    range.push_back(format("%.2f to %.2f %%", *least, *most));
    time.push_back(support::format_seconds(mean_of(one.all(&Run::seconds_per_step))));
    processor.push_back(support::format_seconds(mean_of(one.all(&Run::processor_seconds))));
    memory.push_back(format("%.1f MiB", mean_of(one.all(&Run::peak_bytes)) / 0x1p20));
  }
  support::Table table(head);
  for (const auto& row : {mean, range, time, processor, memory}) table.add(row);
  return table;
}

int run(int argc, char** argv) {
  const std::optional<Options> options = parse_options(argc, argv);
  if (!options) return 0;
  support::count_cpu_memory();
  const std::filesystem::path out = options->out;
  const torch::Device device = options->device.chosen_device();
  const FashionMnist data = read_fashion_mnist(options->data);
  support::make_folder(out);
  std::cout << support::describe(device, options->device.chosen_dtype())
            << support::format("Fashion-MNIST: %lld steps of 64 images\n\n",
                               static_cast<long long>(options->steps))
            << std::flush;

  std::vector<Runs> dtypes{{at::kFloat, drawing::palette::ink},
                           {at::kBFloat16, drawing::palette::blue},
                           {at::kHalf, drawing::palette::orange}};
  for (std::int64_t seed = 0; seed < options->seeds; ++seed) {
    for (Runs& one : dtypes) {  // in turns: other programs disturb all dtypes alike
      const Setting setting{
          .device = device, .dtype = one.dtype, .steps = options->steps, .seed = seed};
      one.runs.push_back(train(data, setting, one.name()));
    }
  }
  write_csv(out / "runs.csv", dtypes, options->steps);
  draw(out / "losses.png", dtypes);
  std::cout << '\n' << table_of(dtypes) << "\nWrote " << out.string() << "\n";

  bool agree = true;
  const double fp32 = mean_of(dtypes.front().all(&Run::accuracy));
  for (const Runs& one : dtypes) {
    const double difference = std::abs(mean_of(one.all(&Run::accuracy)) - fp32);
    const bool is_near = difference <= static_cast<double>(options->margin);
    if (!is_near) {
      std::cout << support::format("%s differs from fp32 by %.2f points; the margin is %lld.\n",
                                   one.name().c_str(), difference,
                                   static_cast<long long>(options->margin));
    }
    agree = agree && is_near;
  }
  return agree ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("fashion_mnist", [&] { return run(argc, argv); });
}
