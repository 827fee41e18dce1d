// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "canvas.h"
#include "text.h"
#include "ticks.h"

namespace drawing {

/// One bar of parts that lie end to end, and a mark across it.
struct StackedBar {
  std::string label;
  std::vector<double> parts;
  double mark = 0.;

  double length() const { return std::accumulate(parts.begin(), parts.end(), 0.); }
};

/// Bars one below the other, each of the same kinds of parts.
struct StackedBars {
  std::string title{}, note{}, x_label{};
  std::vector<std::pair<std::string, Color>> parts{};
  std::vector<StackedBar> bars{};

  /// Draws the bars, labels and legend included, into `area`.
  void draw(Canvas& canvas, Rect area) const {
    double longest = 0., label_width = 0.;
    for (const StackedBar& bar : bars) {
      longest = std::max({longest, bar.length(), bar.mark});
      label_width = std::max(label_width, text_width(bar.label, kLabel));
    }
    const double end = longest > 0. ? longest * 1.04 : 1.;
    const int left = static_cast<int>(label_width) + 34;
    const Rect box{area.x + left, area.y + 78, area.width - left - 24, area.height - 78 - 64};
    const auto to_x = [&](double value) {
      return box.x + static_cast<int>(value / end * box.width + 0.5);
    };

    draw_text(canvas, box.x, area.y + 32, title, {.height = 17.5, .bold = true});
    draw_text(canvas, box.right(), area.y + 32, note,
              {.height = 11., .color = palette::muted, .align = Align::right});
    draw_text(canvas, box.x + box.width / 2., area.bottom() - 14, x_label,
              {.color = palette::muted, .align = Align::centre});
    for (const Tick& tick : linear_ticks(0., end, 8)) {
      canvas.fill({to_x(tick.value), box.y, 1, box.height}, palette::faint_rule);
      draw_text_within(canvas, area, to_x(tick.value), box.bottom() + 24, tick.label,
                       {.height = 11.});
    }
    for (std::size_t i = 0; i < bars.size(); ++i) {
      const int count = static_cast<int>(bars.size()), row = static_cast<int>(i);
      const int top = box.y + row * box.height / count + 6;
      const int height = box.y + (row + 1) * box.height / count - 6 - top;
      draw_text(canvas, box.x - 12, top + height / 2. + 4, bars[i].label,
                {.height = 11., .align = Align::right});
      double from = 0.;
      for (std::size_t part = 0; part < bars[i].parts.size(); ++part) {
        const double to = from + bars[i].parts[part];
        canvas.fill({to_x(from), top, to_x(to) - to_x(from), height}, parts[part].second);
        from = to;
      }
      canvas.fill({to_x(bars[i].mark) - 1, top - 4, 3, height + 8}, palette::ink);
    }
    canvas.fill({box.x, box.y, 1, box.height}, palette::ink);
    double x = box.x;
    for (const auto& [name, color] : parts) {
      canvas.fill({static_cast<int>(x), area.y + 52, 12, 12}, color);
      draw_text(canvas, x + 18, area.y + 62, name, kLabel);
      x += 18 + text_width(name, kLabel) + 22;
    }
  }

 private:
  static constexpr TextStyle kLabel{.height = 11.};
};

}  // namespace drawing
