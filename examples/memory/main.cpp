// SPDX-License-Identifier: BSD-3-Clause
// The memory of each training configuration: planned, and measured on a small transformer; then
// plans for larger models on 1 to 1024 devices. guide/memory.md shows numbers of report.md:
//   torchrun --nproc-per-node 4 --no-python memory --out memory.png > report.md
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "memory/measure.h"
#include "memory/plan.h"
#include "memory/ways.h"
#include "support/arguments.h"
#include "support/check.h"
#include "support/drawing/png_file.h"
#include "support/drawing/stacked_bars.h"
#include "support/format.h"
#include "support/table.h"

namespace {

std::string mebibytes(double bytes) {
  return support::format("%.2f", bytes / (1 << 20));
}

struct Row {
  Way way;
  Plan planned;
  Measured measured;
};

/// One row for each way. Those that are not sharded are process 0's alone.
std::vector<Row> measure_all(const GptSizes& sizes, std::int64_t rows,
                             const torchamp::ProcessGroupPtr& group) {
  std::vector<Row> all;
  for (const Way& way : all_ways()) {
    if (!way.sharded && group->getRank() != 0) continue;
    all.push_back({way, plan(way, sizes, rows, group), measure(way, sizes, rows, group)});
  }
  return all;
}

void print_measured(const std::vector<Row>& rows, double weights) {
  support::Table table({"configuration", "model", "masters", "states", "gradients", "peak, planned",
                        "measured", "bytes per weight"});
  for (const Row& row : rows) {
    const Bytes& planned = row.planned.weights;
    table.add({row.way.name, mebibytes(planned.model), mebibytes(planned.masters),
               mebibytes(planned.states), mebibytes(planned.gradients), mebibytes(row.planned.peak),
               mebibytes(row.measured.peak), support::format("%.1f", planned.sum() / weights)});
  }
  std::cout << table.markdown();
}

/// GiB on each device, without activations and what surrounds the tensors.
void print_plans(const std::vector<double>& billions) {
  std::vector<std::string> head{"billions of weights"};
  for (const double size : billions) head.push_back(support::format("%g", size));
  support::Table table(head);
  for (const Way& way : all_ways()) {
    if (way.autocast) continue;  // as fp32
    for (const int devices : way.sharded ? std::vector<int>{1, 8, 64, 1024} : std::vector<int>{1}) {
      std::vector<std::string> row{
          way.sharded ? support::format("%s, n = %d", way.name.c_str(), devices) : way.name};
      for (const double size : billions) {
        const double bytes = bytes_a_weight(way, devices).sum() * size * 1e9;
        row.push_back(support::format("%.1f", bytes / (1 << 30)));
      }
      table.add(row);
    }
  }
  std::cout << table.markdown();
}

void draw(const std::vector<Row>& rows, const std::string& file) {
  drawing::StackedBars bars{.title = "Memory at the peak of a training step",
                            .note = "lines: measured",
                            .x_label = "MiB of tensors on each process",
                            .parts = {{"model", drawing::palette::green},
                                      {"masters", drawing::palette::blue},
                                      {"states of AdamW", drawing::palette::purple},
                                      {"gradients", drawing::palette::orange},
                                      {"activations, buckets", drawing::palette::rule}}};
  for (const Row& row : rows) {
    const Bytes& bytes = row.planned.weights;
    bars.bars.push_back(
        {row.way.name,
         {bytes.model, bytes.masters, bytes.states, bytes.gradients, row.planned.activations()},
         row.measured.peak / (1 << 20)});
    for (double& part : bars.bars.back().parts) part /= 1 << 20;
  }
  drawing::Canvas canvas(1000, 560, drawing::palette::paper);
  bars.draw(canvas, {0, 0, 1000, 560});
  drawing::write_png(file, canvas.image());
}

bool is_near(double planned, double measured) {
  return std::abs(planned - measured) < 0.05 * measured;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("memory", [&] {
    GptSizes sizes{.layers = 9, .width = 128, .heads = 4, .length = 32, .letters = 256};
    std::int64_t rows = 16, billions = 0;
    std::string file = "memory.png";
    support::Arguments arguments("memory", "Measures and plans what training takes in memory.");
    arguments.add_integer("--layers", "Of the transformer. Default: 9.", sizes.layers, 2, 1000);
    arguments.add_integer("--width", "Of the transformer. Default: 128.", sizes.width, 4, 65536);
    arguments.add_integer("--batch", "Texts of 32 letters. Default: 16.", rows, 1, 65536);
    arguments.add_integer("--billions", "Plan for so many billions of weights, too.", billions, 1,
                          1 << 20);
    arguments.add("--out", "FILE.png", "The chart. Default: " + file + ".", file);
    if (!arguments.parse(argc, argv)) return 0;

    torch::set_num_threads(1);
    support::count_cpu_memory();
    // The others wait while process 0 measures what is not sharded.
    const auto group = torchamp::make_process_group();
    const std::vector<Row> all = measure_all(sizes, rows, group);
    const Weights weights = Weights::of(sizes);
    if (group->getRank() == 0) {
      std::cout << support::format(
          "# Memory of training\n\nA transformer of %.2f million weights on %d process(es), in MiB "
          "on each "
          "process.\n\n## Measured\n\n",
          (weights.narrow + weights.fp32) / 1e6, group->getSize());
      print_measured(all, weights.narrow + weights.fp32);
      draw(all, file);
      std::vector<double> larger{1., 7., 70.};
      if (billions > 0) larger.push_back(static_cast<double>(billions));
      std::cout << "\n## Planned\n\nGiB on each of n devices, without activations.\n\n";
      print_plans(larger);
      std::cout << '\n';
    }
    bool as_planned = true;
    for (const Row& row : all) {
      as_planned = as_planned && is_near(row.planned.weights.kept(), row.measured.kept) &&
                   is_near(row.planned.peak, row.measured.peak);
    }
    if (group->getRank() != 0) return as_planned ? 0 : 1;
    support::check(as_planned, "what is kept, and the peak, are as planned within 5 %");
    return 0;
  });
}
