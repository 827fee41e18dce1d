// SPDX-License-Identifier: BSD-3-Clause
// Does a model train in fp8? Trains a Fashion-MNIST classifier and a small transformer that
// sorts numbers in fp32, in bf16 and with every recipe, with the same initial weights and data.
// Prints the accuracies over several seeds and draws the losses of the first. `fp8 --help` lists
// the options.
#include <torch/torch.h>
#include <torchamp/labs/fp8.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fashion_mnist/data.h"
#include "support/arguments.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/format.h"
#include "support/table.h"

namespace {

using torch::Tensor;
using torchamp::Fp8Recipe;

/// How a model is trained.
struct Way {
  std::string name;
  drawing::Color color;
  std::optional<torchamp::Policy> policy;  // none: fp32
};

std::vector<Way> ways() {
  const auto fp8 = [](torchamp::Fp8Options options) {
    return torchamp::fp8(torchamp::Policy::standard(), torchamp::ops::dense, options);
  };
  return {
      {"fp32", drawing::palette::ink, std::nullopt},
      {"bf16", drawing::palette::muted, torchamp::Policy::standard()},
      {"tensorwise", drawing::palette::blue, fp8({.recipe = Fp8Recipe::tensorwise})},
      {"rowwise", {20, 150, 160}, fp8({.recipe = Fp8Recipe::rowwise})},
      {"blockwise", {60, 150, 70}, fp8({.recipe = Fp8Recipe::blockwise})},
      {"mxfp8", {150, 110, 200}, fp8({.recipe = Fp8Recipe::mxfp8})},
      {"nvfp4", drawing::palette::orange, fp8({.recipe = Fp8Recipe::nvfp4})},
      {"nvfp4, nearest",
       {200, 60, 60},
       fp8({.recipe = Fp8Recipe::nvfp4, .stochastic_rounding = false})},
  };
}

struct Batch {
  Tensor input, target;
};

/// A model and where its data comes from.
class Task {
 public:
  virtual ~Task() = default;
  virtual std::string name() const = 0;
  virtual torch::nn::Sequential model() const = 0;
  virtual Batch training(std::int64_t size) const = 0;  // drawn at random
  virtual Batch test() const = 0;
};

class Clothes final : public Task {
 public:
  explicit Clothes(FashionMnist data) : data_(std::move(data)) {}
  std::string name() const override { return "Fashion-MNIST, two hidden layers of 256"; }
  torch::nn::Sequential model() const override {
    using namespace torch::nn;
    return Sequential(Flatten(), Linear(784, 256), GELU(), Linear(256, 256), GELU(),
                      Linear(256, 10));
  }
  Batch training(std::int64_t size) const override {
    const auto chosen = torch::randint(data_.train.images().size(0), {size}, torch::kLong);
    return {data_.train.images().index_select(0, chosen),
            data_.train.targets().index_select(0, chosen)};
  }
  Batch test() const override { return {data_.test.images(), data_.test.targets()}; }

 private:
  FashionMnist data_;
};

class Sorting final : public Task {
 public:
  std::string name() const override { return "Sorting ten digits, a transformer of two layers"; }
  torch::nn::Sequential model() const override {
    using namespace torch::nn;
    const auto layer = TransformerEncoderLayerOptions(64, 4).dim_feedforward(128).dropout(0.);
    return Sequential(Linear(20, 64), TransformerEncoder(TransformerEncoderLayer(layer), 2),
                      Linear(64, 10));
  }
  Batch training(std::int64_t size) const override { return draw(size); }
  Batch test() const override { return draw(1000); }

 private:
  static Batch draw(std::int64_t size) {
    const Tensor digits = torch::randint(10, {10, size}, torch::kLong);
    const Tensor places = torch::eye(10).unsqueeze(1).expand({10, size, 10});
    const Tensor codes = torch::one_hot(digits, 10).to(torch::kFloat);
    return {torch::cat({codes, places}, 2), std::get<0>(digits.sort(0))};
  }
};

struct Run {
  std::vector<double> losses;
  double accuracy = 0.;  // per cent
};

Run train(const Task& task, const Way& way, std::int64_t steps, std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  auto model = task.model();
  torchamp::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(2e-3));
  const torchamp::AutocastOptions options{.enabled = way.policy.has_value(), .policy = way.policy};
  Run run;
  for (std::int64_t step = 0; step < steps; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(1000 * seed + step));  // of the data
    const Batch batch = task.training(128);
    optimizer.zero_grad();
    Tensor loss;
    {
      const torchamp::AutocastGuard autocast(torch::kCPU, options);
      const Tensor scores = model->forward(batch.input);
      loss = torch::nn::functional::cross_entropy(scores.flatten(0, -2), batch.target.flatten());
    }
    loss.backward();
    optimizer.step();
    run.losses.push_back(loss.item<double>());
  }
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  const Batch batch = task.test();
  const torchamp::AutocastGuard autocast(torch::kCPU, options);
  const Tensor right = model->forward(batch.input).argmax(-1).eq(batch.target);
  run.accuracy = 100. * right.to(torch::kFloat).mean().item<double>();
  return run;
}

/// "91.2 +- 0.3": mean and standard deviation.
std::string spread(const std::vector<double>& values) {
  double mean = 0., square = 0.;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  for (const double value : values) square += (value - mean) * (value - mean);
  const double degrees = std::max(1., static_cast<double>(values.size()) - 1.);
  return support::format("%.2f +- %.2f", mean, std::sqrt(square / degrees));
}

int run(int argc, char** argv) {
  std::string data = "/usr/share/datasets/fashion-mnist", file = "fp8.png";
  std::int64_t steps = 200, seeds = 5;
  support::Arguments arguments("fp8",
                               "Trains a classifier and a small transformer on a CPU in fp32, in "
                               "bf16 and in every\nfp8 recipe, and compares them.");
  arguments.add("--data", "DIR", "The folder of Fashion-MNIST. Default: " + data + ".", data);
  arguments.add("--picture", "FILE", "Where to draw the losses. Default: " + file + ".", file);
  arguments.add_integer("--steps", "Of 128 rows. Default: 200.", steps, 2, 1'000'000);
  arguments.add_integer("--seeds", "How many runs of each. Default: 5.", seeds, 1, 1000);
  if (!arguments.parse(argc, argv)) return 0;

  const Clothes clothes(read_fashion_mnist(data));
  const Sorting sorting;
  drawing::Canvas canvas(1000, 1240, drawing::palette::paper);
  support::Table table({"accuracy, per cent", "clothes", "sorting"});
  std::vector<std::vector<std::string>> rows;
  for (const Way& way : ways()) rows.push_back({way.name});
  int top = 0;
  bool finite = true;
  for (const Task* const task :
       {static_cast<const Task*>(&clothes), static_cast<const Task*>(&sorting)}) {
    drawing::LinePlot plot{
        .title = task->name(), .x_label = "step", .y_label = "loss", .log_y = true};
    std::size_t row = 0;
    for (const Way& way : ways()) {
      std::vector<double> accuracies;
      for (std::int64_t seed = 0; seed < seeds; ++seed) {
        const Run one = train(*task, way, steps, seed);
        finite = finite && std::isfinite(one.losses.back());
        accuracies.push_back(one.accuracy);
        if (seed > 0) continue;
        plot.series.push_back({.label = way.name,
                               .color = way.color,
                               .values = drawing::running_median(one.losses, 9)});
      }
      rows[row++].push_back(spread(accuracies));
    }
    plot.draw(canvas, {0, top, 1000, 600});
    top += 620;
  }
  for (const auto& row : rows) table.add({row[0], row[1], row[2]});
  drawing::write_png(file, canvas.image());
  std::cout << table << "mean and standard deviation of " << seeds << " seeds, " << steps
            << " steps; see " << file << '\n';
  return finite ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("fp8", [&] { return run(argc, argv); });
}
