// SPDX-License-Identifier: BSD-3-Clause
// Does a model train in fp8? Trains a Fashion-MNIST classifier and a small transformer that
// sorts numbers in fp32, in bf16 and with every recipe, with the same initial weights and data.
// Prints the accuracies over several seeds. `fp8 --help` lists the options.
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
#include "support/format.h"
#include "support/table.h"

namespace {

using torch::Tensor;
using torchamp::Fp8Recipe;

/// How a model is trained.
struct Way {
  std::string name;
  std::optional<torchamp::Policy> policy;  // none: fp32
};

std::vector<Way> ways() {
  const auto fp8 = [](torchamp::Fp8Options options) {
    return torchamp::fp8(torchamp::Policy::standard(), torchamp::ops::dense, options);
  };
  return {
      {"fp32", std::nullopt},
      {"bf16", torchamp::Policy::standard()},
      {"tensorwise", fp8({.recipe = Fp8Recipe::tensorwise})},
      {"rowwise", fp8({.recipe = Fp8Recipe::rowwise})},
      {"blockwise", fp8({.recipe = Fp8Recipe::blockwise})},
      {"mxfp8", fp8({.recipe = Fp8Recipe::mxfp8})},
      {"nvfp4", fp8({.recipe = Fp8Recipe::nvfp4})},
      {"nvfp4, nearest", fp8({.recipe = Fp8Recipe::nvfp4, .stochastic_rounding = false})},
  };
}

struct Batch {
  Tensor input, target;
};

/// A model and where its data comes from.
class Task {
 public:
  virtual ~Task() = default;
  virtual torch::nn::Sequential model() const = 0;
  virtual Batch training(std::int64_t size) const = 0;  // drawn at random
  virtual Batch test() const = 0;
};

/// Fashion-MNIST, two hidden layers of 256.
class Clothes final : public Task {
 public:
  explicit Clothes(FashionMnist data) : data_(std::move(data)) {}
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

/// Sorting ten digits, a transformer of two layers.
class Sorting final : public Task {
 public:
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
  double loss = 0.;      // of the last step
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
    run.loss = loss.item<double>();
  }
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  const Batch batch = task.test();
  const torchamp::AutocastGuard autocast(torch::kCPU, options);
  const Tensor right = model->forward(batch.input).argmax(-1).eq(batch.target);
  run.accuracy = 100. * right.to(torch::kFloat).mean().item<double>();
  return run;
}

/// Mean and standard deviation, two cells of a table.
void add_spread(std::vector<std::string>& row, const std::vector<double>& values) {
  double mean = 0., square = 0.;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  for (const double value : values) square += (value - mean) * (value - mean);
  const double degrees = std::max(1., static_cast<double>(values.size()) - 1.);
  row.push_back(support::format("%.2f", mean));
  row.push_back(support::format("%.2f", std::sqrt(square / degrees)));
}

int run(int argc, char** argv) {
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::int64_t steps = 200, seeds = 5;
  support::Arguments arguments("fp8",
                               "Trains a classifier and a small transformer on a CPU in fp32, in "
                               "bf16 and in every\nfp8 recipe, and compares them.");
  arguments.add("--data", "DIR", "The folder of Fashion-MNIST. Default: " + data + ".", data);
  arguments.add_integer("--steps", "Of 128 rows. Default: 200.", steps, 2, 1'000'000);
  arguments.add_integer("--seeds", "How many runs of each. Default: 5.", seeds, 1, 1000);
  if (!arguments.parse(argc, argv)) return 0;

  const Clothes clothes(read_fashion_mnist(data));
  const Sorting sorting;
  support::Table table({"accuracy in %", "Fashion-MNIST", "deviation", "sorting", "deviation"});
  std::vector<std::vector<std::string>> rows;
  for (const Way& way : ways()) rows.push_back({way.name});
  bool finite = true;
  for (const Task* const task :
       {static_cast<const Task*>(&clothes), static_cast<const Task*>(&sorting)}) {
    std::size_t row = 0;
    for (const Way& way : ways()) {
      std::vector<double> accuracies;
      for (std::int64_t seed = 0; seed < seeds; ++seed) {
        const Run one = train(*task, way, steps, seed);
        finite = finite && std::isfinite(one.loss);
        accuracies.push_back(one.accuracy);
      }
      add_spread(rows[row++], accuracies);
    }
  }
  for (const auto& row : rows) table.add(row);
  std::cout << "# Training in fp8\n\nMean and standard deviation of " << seeds << " seeds, "
            << steps << " steps of 128 rows, on a CPU.\n\n"
            << table.markdown();
  return finite ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("fp8", [&] { return run(argc, argv); });
}
