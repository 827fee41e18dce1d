// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "canvas.h"
#include "text.h"
#include "ticks.h"

namespace drawing {

/// A marked part of an axis.
struct Span {
  std::string label;
  double from, to;
  Color color;
};

/// Bars side by side, each 1 wide, over an axis with marked parts.
struct Histogram {
  std::string title{}, x_label{}, y_label{};
  double first = 0.;             ///< where the first bar begins
  std::vector<double> values{};  ///< the bars' heights
  std::vector<Span> spans{};

  /// Draws the histogram, labels included, into `area`.
  void draw(Canvas& canvas, Rect area) const {
    const double highest = *std::max_element(values.begin(), values.end());
    const double top = highest > 0. ? highest * 1.06 : 1.;
    const double last = first + static_cast<double>(values.size());
    const Rect box{area.x + 92, area.y + 78, area.width - 92 - 24, area.height - 78 - 64};
    const auto to_x = [&](double x) {
      const double along = std::clamp((x - first) / (last - first), 0., 1.);
      return box.x + static_cast<int>(along * box.width);
    };
    const auto to_y = [&](double y) {
      return box.bottom() - static_cast<int>(y / top * box.height);
    };

    draw_text(canvas, box.x, area.y + 32, title, {.height = 17.5, .bold = true});
    draw_text(canvas, box.x + box.width / 2., area.bottom() - 14, x_label,
              {.color = palette::muted, .align = Align::centre});
    draw_text_upwards(canvas, area.x + 26, box.y + box.height / 2., y_label,
                      {.color = palette::muted, .align = Align::centre});
    for (const Span& span : spans) {
      const int from = to_x(span.from), to = to_x(span.to);
      canvas.fill({from, box.y, to - from, box.height}, span.color);
      draw_text(canvas, (from + to) / 2., box.y - 9, span.label,
                {.height = 11., .align = Align::centre});
    }
    for (const Tick& tick : linear_ticks(0., top, 6)) {
      canvas.fill({box.x, to_y(tick.value), box.width, 1}, palette::rule);
      draw_text(canvas, box.x - 10, to_y(tick.value) + 5, tick.label,
                {.height = 11., .align = Align::right});
    }
    for (const Tick& tick : linear_ticks(first, last, 10)) {
      canvas.fill({to_x(tick.value), box.bottom(), 1, 6}, palette::ink);
      draw_text(canvas, to_x(tick.value), box.bottom() + 24, tick.label,
                {.height = 11., .align = Align::centre});
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double x = first + static_cast<double>(i);
      const int left = to_x(x) + 1, y = to_y(values[i]);
      canvas.fill({left, y, to_x(x + 1.) - left, box.bottom() - y}, palette::blue);
    }
    canvas.fill({box.x, box.y, 1, box.height}, palette::ink);
    canvas.fill({box.x, box.bottom() - 1, box.width, 1}, palette::ink);
  }
};

}  // namespace drawing
