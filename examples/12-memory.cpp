// SPDX-License-Identifier: BSD-3-Clause
// Two ways to train in less memory. Master weights: the model is in bf16, so weights and
// activations take half the memory; the optimizer's fp32 weights keep small updates. Recomputation:
// activations grow with the square root of the depth, because backward computes most of them again.
// Measures both, and draws the second into a PNG file:
//   12-memory [FILE.png]
#include <torch/torch.h>
#include <torchamp/master_weights.h>
#include <torchamp/recompute.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <iostream>
#include <optional>

#include "support/check.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/format.h"
#include "support/peak_memory.h"

namespace {

enum class Kind { fp32, bf16, bf16_with_masters };

struct Result {
  std::int64_t weights = 0;      // bytes of the model's parameters
  std::int64_t activations = 0;  // bytes that a forward allocates and keeps
  double loss = 0.;              // at the end
};

std::int64_t bytes_now(torch::Device device) {
  return support::PeakMemory(device).bytes();  // a peak that begins here
}

Result train(Kind kind, torch::Device device) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(32, 128), torch::nn::Tanh(),
                              torch::nn::Linear(128, 128), torch::nn::Tanh(),
                              torch::nn::Linear(128, 8));
  model->to(device);
  const auto data = torch::randn({256, 32}, device);
  const auto target = data.narrow(1, 0, 8).sin();

  std::optional<torchamp::MasterWeights> masters;
  if (kind == Kind::bf16_with_masters) {
    masters.emplace(model, torchamp::MasterWeightsOptions{.dtype = torch::kBFloat16});
  } else if (kind == Kind::bf16) {
    model->to(torch::kBFloat16);
  }
  torch::optim::SGD optimizer(masters ? masters->parameters() : model->parameters(),
                              torch::optim::SGDOptions(0.02));
  const auto input = kind == Kind::fp32 ? data : data.to(torch::kBFloat16);

  Result result;
  for (const auto& parameter : model->parameters()) {
    result.weights += static_cast<std::int64_t>(parameter.nbytes());
  }
  for (int step = 0; step < 400; ++step) {
    optimizer.zero_grad();
    const std::int64_t before = bytes_now(device);
    const auto output = model->forward(input);
    result.activations = bytes_now(device) - before;
    const auto loss = torch::mse_loss(output.to(torch::kFloat), target);
    loss.backward();
    if (masters) masters->take_gradients();
    optimizer.step();
    if (masters) masters->copy_to_model();
    result.loss = loss.item<double>();
  }
  return result;
}

void print(const char* name, const Result& result) {
  std::cout << support::format("%-18s weights %3lld KiB, activations %3lld KiB, loss %.4f\n", name,
                               static_cast<long long>(result.weights / 1024),
                               static_cast<long long>(result.activations / 1024), result.loss);
}

void show_master_weights(torch::Device device) {
  const Result fp32 = train(Kind::fp32, device), bf16 = train(Kind::bf16, device),
               masters = train(Kind::bf16_with_masters, device);
  print("fp32", fp32);
  print("bf16", bf16);
  print("bf16 with masters", masters);

  support::check(masters.weights * 2 == fp32.weights, "the model's weights take half the memory");
  support::check(masters.activations * 2 == fp32.activations,
                 "the activations take half the memory");
  support::check(std::abs(masters.loss - fp32.loss) < 0.02 * fp32.loss,
                 "with masters, the loss is fp32's");
  support::check(bf16.loss > 1.2 * fp32.loss, "without masters, small updates are lost");
}

constexpr std::int64_t rows = 2048, width = 16;

/// Keeps one activation for backward, of `rows` x `width` numbers.
struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear =
      register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(width, width)));
};
TORCH_MODULE(Block);

/// The most memory of one forward and backward, in activations of one block.
double peak(std::int64_t depth, bool recompute) {
  torch::nn::Sequential model;
  for (std::int64_t i = 0; i < depth; ++i) model->push_back(Block());
  const auto x = torch::randn({rows, width}).requires_grad_();
  const std::int64_t before = support::PeakMemory(torch::kCPU).bytes();
  const support::PeakMemory memory(torch::kCPU);
  const auto y = recompute ? torchamp::checkpoint_sequential(model, x)  // sqrt(depth) segments
                           : model->forward(x);
  y.sum().backward();
  return static_cast<double>(memory.bytes() - before) / static_cast<double>(x.nbytes());
}

void show_recomputation(const char* file) {
  constexpr std::int64_t deepest = 100;
  drawing::Series plain{"plain", drawing::palette::muted}, recomputed{"recomputed"},
      root{"2 x square root of the depth", drawing::palette::rule};
  for (std::int64_t depth = 1; depth <= deepest; ++depth) {
    plain.values.push_back(peak(depth, false));
    recomputed.values.push_back(peak(depth, true));
    root.values.push_back(2. * std::sqrt(static_cast<double>(depth)));
  }

  const auto at = [](const drawing::Series& series, std::int64_t depth) {
    return series.values[static_cast<std::size_t>(depth) - 1];
  };
  std::cout << "activations held at most, of one block's size\ndepth  plain  recomputed\n";
  for (const std::int64_t depth : {4, 16, 36, 64, 100}) {
    std::cout << support::format("%5d %6.1f %11.1f\n", static_cast<int>(depth), at(plain, depth),
                                 at(recomputed, depth));
  }
  support::check(at(plain, 100) > 3.5 * at(plain, 25), "four times as deep: four times as much");
  support::check(at(recomputed, 100) < 2.2 * at(recomputed, 25), "recomputed: twice as much");
  support::check(at(recomputed, 100) < at(plain, 100) / 4., "less than a quarter at 100 blocks");

  drawing::Canvas canvas(1000, 620, drawing::palette::paper);
  drawing::LinePlot{.title = "Memory for activations",
                    .note = "forward and backward, at the peak",
                    .x_label = "depth in blocks",
                    .y_label = "activations of one block",
                    .series = {root, plain, recomputed},
                    .legend_at_left = true}
      .draw(canvas, {0, 0, 1000, 620});
  drawing::write_png(file, canvas.image());
  std::cout << "see " << file << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  support::count_cpu_memory();
  show_master_weights(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  show_recomputation(argc > 1 ? argv[1] : "12-memory.png");
}
