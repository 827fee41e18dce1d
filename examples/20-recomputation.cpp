// SPDX-License-Identifier: BSD-3-Clause
// Recomputation: the memory for activations grows with the depth of a network, or with the
// square root of the depth if backward computes most of them again. Measures this, and draws it
// into a PNG file:
//   20-recomputation [FILE.png]
#include <torch/torch.h>
#include <torchamp/recompute.h>

#include <cmath>
#include <iostream>

#include "support/check.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/format.h"
#include "support/peak_memory.h"

namespace {

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

}  // namespace

int main(int argc, char** argv) {
  support::count_cpu_memory();
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
  support::check(at(recomputed, 100) < 2.2 * at(recomputed, 25), "or, recomputed, twice as much");
  support::check(at(recomputed, 100) < at(plain, 100) / 4., "less than a quarter at 100 blocks");

  drawing::Canvas canvas(1000, 620, drawing::palette::paper);
  drawing::LinePlot{.title = "Memory for activations",
                    .note = "forward and backward, at the peak",
                    .x_label = "depth in blocks",
                    .y_label = "activations of one block",
                    .series = {root, plain, recomputed},
                    .legend_at_left = true}
      .draw(canvas, {0, 0, 1000, 620});
  const char* const file = argc > 1 ? argv[1] : "20-recomputation.png";
  drawing::write_png(file, canvas.image());
  std::cout << "see " << file << '\n';
}
