// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "checkerboard/target.h"
#include "checkerboard/train.h"
#include "support/drawing/canvas.h"
#include "support/drawing/plot.h"
#include "support/drawing/png_file.h"
#include "support/drawing/text.h"
#include "support/format.h"
#include "support/table.h"

/// The mean of the last tenth of the losses: a single one jumps from step to step.
inline double mean_of_last_tenth(const std::vector<double>& losses) {
  const std::size_t count = std::max<std::size_t>(1, losses.size() / 10);
  return std::accumulate(losses.end() - static_cast<std::ptrdiff_t>(count), losses.end(), 0.) /
         static_cast<double>(count);
}

/// Both runs side by side, and what the second saves.
inline void print_table(std::ostream& out, const Run& fp32, const Run& amp) {
  using support::format;
  const auto saved = [](double before, double after) {
    const double percent = (1. - after / before) * 100.;
    if (std::abs(percent) < 0.5) return std::string("the same");
    return format("%.0f %% %s", std::abs(percent), percent > 0. ? "saved" : "more");
  };
  support::Table table({"", fp32.name, amp.name, ""});
  const auto add_loss = [&](const char* title, double before, double after) {
    table.add({title, format("%.4f", before), format("%.4f", after)});
  };
  add_loss("loss, first step", fp32.losses.front(), amp.losses.front());
  add_loss("loss, last step", fp32.losses.back(), amp.losses.back());
  add_loss("loss, mean of the last tenth", mean_of_last_tenth(fp32.losses),
           mean_of_last_tenth(amp.losses));
  table.add({"time per step", support::format_seconds(fp32.seconds_per_step),
             support::format_seconds(amp.seconds_per_step),
             saved(fp32.seconds_per_step, amp.seconds_per_step)});
  table.add({"peak memory (tensors)", support::format_bytes(fp32.peak_bytes),
             support::format_bytes(amp.peak_bytes),
             saved(static_cast<double>(fp32.peak_bytes), static_cast<double>(amp.peak_bytes))});
  table.add({"scale at the end", "", format("%g", amp.scale)});
  table.add({"skipped steps", "", format("%lld", static_cast<long long>(amp.skipped))});
  out << table;
}

/// Target and outputs side by side, each pixel as a block large enough to be seen.
inline drawing::Canvas draw_comparison(const std::string& heading, const torch::Tensor& target,
                                       const Run& fp32, const Run& amp) {
  using namespace drawing;
  using namespace support;
  struct Panel {
    std::string title, loss, time;
    Image image;
  };
  const auto panel_of = [](const Run& run, const std::string& title) {
    return Panel{title, format("mean loss at the end %.4f", mean_of_last_tenth(run.losses)),
                 format_seconds(run.seconds_per_step) + " a step", to_image(run.output)};
  };
  const Panel panels[] = {{"Target", "", "", to_image(target)},
                          panel_of(fp32, fp32.name),
                          panel_of(amp, amp.name + " with torchamp")};
  const Image& first = panels[0].image;
  const int block = std::max(1, 384 / std::max(first.width, first.height));
  const int width = first.width * block, height = first.height * block;
  constexpr int margin = 32, top = 118, bottom = 80;
  const int column = std::max(width, 300) + margin;
  Canvas canvas(3 * column + margin, top + height + bottom, palette::paper);
  draw_text(canvas, margin, 46, heading, {.height = 21., .bold = true});
  int x = margin;
  for (const Panel& panel : panels) {
    draw_text(canvas, x, top - 16, panel.title, {.height = 14.});
    canvas.draw(panel.image, {x, top, width, height});
    canvas.frame({x - 1, top - 1, width + 2, height + 2}, palette::muted);
    draw_text(canvas, x, top + height + 30, panel.loss, {.height = 14., .color = palette::muted});
    draw_text(canvas, x, top + height + 52, panel.time, {.height = 14., .color = palette::muted});
    x += column;
  }
  return canvas;
}

/// The loss of each step, thin, and its running median, thick.
inline drawing::Canvas draw_losses(const std::string& heading, const Run& fp32, const Run& amp) {
  using namespace drawing;
  using namespace support;
  Canvas canvas(1040, 600, palette::paper);
  const std::size_t window = fp32.losses.size() / 25 | 1;
  LinePlot plot{.title = heading, .x_label = "step", .y_label = "mean squared error"};
  if (window > 1) plot.note = format("thin: each step, thick: median of %zu steps", window);
  plot.log_y = true;
  plot.series = {
      {.color = palette::blue, .values = fp32.losses, .line_width = 1.2, .opacity = 0.35},
      {.color = palette::orange, .values = amp.losses, .line_width = 1.2, .opacity = 0.35},
      {.label = fp32.name, .color = palette::blue, .values = running_median(fp32.losses, window)},
      {.label = amp.name + " with torchamp",
       .color = palette::orange,
       .values = running_median(amp.losses, window)}};
  plot.draw(canvas, {0, 0, canvas.width(), canvas.height()});
  return canvas;
}
