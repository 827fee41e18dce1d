// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "canvas.h"
#include "text.h"
#include "ticks.h"

namespace drawing {

/// One line of a plot: the value at x = 1, 2, 3, …; values that cannot be shown leave a gap.
struct Series {
  std::string label{};  ///< in the legend; none if empty
  Color color = palette::ink;
  std::vector<double> values{};
  double line_width = 2.;
  double opacity = 1.;
};

/// Lines over a common axis, with grid, axis labels, title (and a note at its right) and legend.
struct LinePlot {
  std::string title{}, note{}, x_label{}, y_label{};
  std::vector<Series> series{};
  bool log_y = false;
  bool legend_at_left = false;         ///< for lines that rise
  std::vector<std::string> x_ticks{};  ///< what stands at x = 1, 2, 3, …; the numbers if empty

  /// Draws the plot, labels included, into `area`.
  void draw(Canvas& canvas, Rect area) const {
    const auto [low, high] = y_range();
    const double last = static_cast<double>(longest());
    const Rect box{area.x + 92, area.y + 52, area.width - 92 - 24, area.height - 52 - 64};
    const auto to_x = [&](double x) {
      return box.x + (x - 1.) / std::max(last - 1., 1.) * (box.width - 1) + 0.5;
    };
    const auto to_y = [&, low = low, high = high](double y) {
      const double height =
          log_y ? std::log(y / low) / std::log(high / low) : (y - low) / (high - low);
      return box.bottom() - 1 - height * (box.height - 1) + 0.5;
    };

    draw_text(canvas, box.x, area.y + 32, title, {.height = 17.5, .bold = true});
    draw_text(canvas, box.right(), area.y + 32, note,
              {.height = 11., .color = palette::muted, .align = Align::right});
    draw_text(canvas, box.x + box.width / 2., box.bottom() + 50, x_label,
              {.color = palette::muted, .align = Align::centre});
    draw_text_upwards(canvas, area.x + 26, box.y + box.height / 2., y_label,
                      {.color = palette::muted, .align = Align::centre});

    for (const Tick& tick : log_y ? log_ticks(low, high) : linear_ticks(low, high, 6)) {
      const int y = static_cast<int>(to_y(tick.value));
      canvas.fill({box.x, y, box.width, 1}, tick.is_major() ? palette::rule : palette::faint_rule);
      draw_text(canvas, box.x - 10, y + 5, tick.label, {.height = 11., .align = Align::right});
    }
    std::vector<Tick> ticks = x_ticks.empty() ? linear_ticks(1., last, 8) : std::vector<Tick>();
    for (const std::string& label : x_ticks) {
      ticks.push_back({static_cast<double>(ticks.size() + 1), label});
    }
    for (const Tick& tick : ticks) {
      const int x = static_cast<int>(to_x(tick.value));
      canvas.fill({x, box.bottom(), 1, 6}, palette::ink);
      draw_text_within(canvas, area, x, box.bottom() + 24, tick.label, {.height = 11.});
    }
    for (const Series& one : series) {
      canvas.stroke(lines_of(one, to_x, to_y), one.line_width, one.color, one.opacity);
    }
    canvas.fill({box.x, box.y, 1, box.height}, palette::ink);
    canvas.fill({box.x, box.bottom() - 1, box.width, 1}, palette::ink);
    draw_legend(canvas, box);
  }

 private:
  bool can_show(double value) const { return std::isfinite(value) && (!log_y || value > 0.); }

  std::size_t longest() const {
    std::size_t count = 1;
    for (const Series& one : series) count = std::max(count, one.values.size());
    return count;
  }

  /// The range of what can be shown, a little wider; 0 to 1, or a decade, if that is nothing.
  std::pair<double, double> y_range() const {
    double low = std::numeric_limits<double>::infinity(), high = -low;
    for (const Series& one : series) {
      for (const double value : one.values) {
        if (can_show(value)) low = std::min(low, value), high = std::max(high, value);
      }
    }
    if (low > high) return log_y ? std::pair{0.1, 1.} : std::pair{0., 1.};
    if (log_y) {
      const double margin = std::max(std::pow(high / low, 0.06), 1.1);
      return {low / margin, high * margin};
    }
    const double margin = high > low ? (high - low) * 0.06 : std::max(std::abs(high), 1.) * 0.5;
    return {low - margin, high + margin};
  }

  template <class ToX, class ToY>
  std::vector<Polyline> lines_of(const Series& one, ToX to_x, ToY to_y) const {
    std::vector<Polyline> lines(1);
    for (std::size_t i = 0; i < one.values.size(); ++i) {
      if (can_show(one.values[i])) {
        lines.back().push_back({to_x(static_cast<double>(i + 1)), to_y(one.values[i])});
      } else if (!lines.back().empty()) {
        lines.emplace_back();
      }
    }
    return lines;
  }

  /// Width and height; no height without labels.
  std::pair<int, int> legend_size() const {
    double widest = 0.;
    int rows = 0;
    for (const Series& one : series) {
      if (one.label.empty()) continue;
      widest = std::max(widest, text_width(one.label, {.height = 12.}));
      ++rows;
    }
    return {static_cast<int>(widest) + 72, rows == 0 ? 0 : rows * 26 + 14};
  }

  /// In an upper corner, over the lines: a falling loss leaves the right corner free.
  void draw_legend(Canvas& canvas, Rect box) const {
    const auto [width, height] = legend_size();
    if (height == 0) return;
    const int x = legend_at_left ? box.x + 12 : box.right() - width - 12;
    const Rect frame{x, box.y + 12, width, height};
    canvas.fill(frame, palette::paper);
    canvas.frame(frame, palette::rule);
    double y = frame.y + 25.;
    for (const Series& one : series) {
      if (one.label.empty()) continue;
      canvas.stroke({{{frame.x + 14., y - 5.5}, {frame.x + 44., y - 5.5}}}, one.line_width + 1.,
                    one.color, one.opacity);
      draw_text(canvas, frame.x + 56, y, one.label, {.height = 12.});
      y += 26.;
    }
  }
};

/// The median of the `window` values around each (1 or more, an odd number): a curve without its
/// noise and its spikes. Near the ends the window is the first or the last whole one.
inline std::vector<double> running_median(const std::vector<double>& values, std::size_t window) {
  std::vector<double> result, around;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t reach = (std::min(window, values.size()) - 1) / 2;
    const std::size_t first = std::clamp(i, reach, values.size() - 1 - reach) - reach;
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
    around.assign(begin, begin + static_cast<std::ptrdiff_t>(2 * reach + 1));
    const auto median = around.begin() + static_cast<std::ptrdiff_t>(reach);
    std::nth_element(around.begin(), median, around.end());
    result.push_back(*median);
  }
  return result;
}

}  // namespace drawing
