// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "canvas.h"
#include "text.h"
#include "ticks.h"

namespace drawing {

/// Bars in groups, measured by what is 1: a line with a name. The part of a bar beyond that line
/// has a colour of its own. Numbers stand in columns at the right, where no line runs. The picture
/// is drawn for a page of 800 pixels, at twice that size, on paper of its own.
struct BarChart {
  struct Bar {
    std::size_t series;
    double value;                      ///< below 0: none
    std::vector<std::string> numbers;  ///< one for each of `columns`; or one text instead of a bar
  };
  struct Group {
    std::string name, note;
    std::vector<Bar> bars;
  };
  std::string title{}, subtitle{};
  std::vector<std::pair<std::string, Color>> series{};
  std::string mark{};    ///< what is 1: "fp32"
  std::string beyond{};  ///< "slower than fp32"
  std::vector<std::string> columns{};
  std::vector<Group> groups{};
  std::vector<std::string> notes{};  ///< below, a line each

  static constexpr int width = 1600, margin = 48;

  Canvas draw() const {
    const int top = legend_bottom() + 84;
    const int foot = 56 + static_cast<int>(notes.size()) * 34 + margin / 2;
    const Rect box{margin + names_width() + 28, top,
                   width - 2 * margin - names_width() - 28 - numbers_width(), rows_height()};
    Canvas canvas(width, box.bottom() + foot, palette::paper);
    canvas.frame({0, 0, width, canvas.height()}, palette::rule);
    draw_text(canvas, margin, 76, title, {.height = 28., .bold = true});
    draw_text(canvas, margin, 118, subtitle, kMuted);
    walk_legend([&](const std::string& name, Color color, int x, int y, bool is_line) {
      canvas.fill(is_line ? Rect{x + 11, y - 24, 4, 30} : Rect{x, y - 22, 26, 26}, color);
      draw_text(canvas, x + 38, y, name, kText);
    });
    draw_axis(canvas, box);
    int y = box.y;
    for (const Group& group : groups) {
      draw_group(canvas, box, group, y);
      y += group_height(group) + kGap;
    }
    for (std::size_t i = 0; i < notes.size(); ++i) {
      draw_text(canvas, margin, box.bottom() + 80 + static_cast<int>(i) * 34, notes[i], kMuted);
    }
    return canvas;
  }

 private:
  static constexpr int kBar = 30, kStep = 40, kGap = 34;
  static constexpr TextStyle kText{.height = 21.}, kMuted{.height = 18.5, .color = palette::muted},
      kNumber{.height = 20., .align = Align::right};

  static int group_height(const Group& group) {
    return std::max(static_cast<int>(group.bars.size()) * kStep, 2 * kStep);
  }
  int rows_height() const {
    int height = 0;
    for (const Group& group : groups) height += group_height(group) + kGap;
    return height;
  }

  int names_width() const {
    double widest = 0.;
    for (const Group& group : groups) {
      widest = std::max({widest, text_width(group.name, {.height = 22., .bold = true}),
                         text_width(group.note, kMuted)});
    }
    return static_cast<int>(widest);
  }

  int column_width(std::size_t column) const {
    double widest = text_width(columns[column], kMuted);
    for (const Group& group : groups) {
      for (const Bar& bar : group.bars) {
        if (bar.value >= 0.) widest = std::max(widest, text_width(bar.numbers[column], kNumber));
      }
    }
    return static_cast<int>(widest) + 30;
  }
  int numbers_width() const {
    int sum = 0;
    for (std::size_t column = 0; column < columns.size(); ++column) sum += column_width(column);
    return sum;
  }

  /// The end of the axis.
  double most() const {
    double longest = 1.;
    for (const Group& group : groups) {
      for (const Bar& bar : group.bars) longest = std::max(longest, bar.value);
    }
    return longest * 1.04;
  }
  int to_x(Rect box, double value) const {
    return box.x + static_cast<int>(value / most() * box.width + 0.5);
  }

  /// Calls draw(name, colour, x, base line, is_line) for each entry. Returns the last base line.
  template <class DrawEntry>
  int walk_legend(const DrawEntry& draw) const {
    int x = margin, y = 176;
    const auto entry = [&](const std::string& name, Color color, bool is_line) {
      const int needed = 38 + static_cast<int>(text_width(name, kText));
      if (x > margin && x + needed > width - margin) x = margin, y += 44;
      draw(name, color, x, y, is_line);
      x += needed + 44;
    };
    for (const auto& [name, color] : series) entry(name, color, false);
    x = margin, y += 44;
    entry(mark + " = 1", palette::ink, true);
    if (has_beyond()) entry(beyond, palette::orange, false);
    return y;
  }
  int legend_bottom() const {
    return walk_legend([](const std::string&, Color, int, int, bool) {});
  }
  bool has_beyond() const {
    for (const Group& group : groups) {
      for (const Bar& bar : group.bars) {
        if (bar.value > 1.) return true;
      }
    }
    return false;
  }

  void draw_axis(Canvas& canvas, Rect box) const {
    for (const Tick& tick : linear_ticks(0., most(), 5)) {
      const int x = to_x(box, tick.value);
      canvas.fill({x - 1, box.y - 10, 2, box.height}, palette::faint_rule);
      draw_text_within(canvas, {0, 0, width, canvas.height()}, x, box.bottom() + 24, tick.label,
                       {.height = 18.5, .color = palette::muted});
    }
    int right = width - margin;
    for (std::size_t column = columns.size(); column-- > 0; right -= column_width(column)) {
      draw_text(canvas, right, box.y - 26, columns[column],
                {.height = 18.5, .color = palette::muted, .align = Align::right});
    }
  }

  void draw_group(Canvas& canvas, Rect box, const Group& group, int y) const {
    draw_text(canvas, margin, y + 24, group.name, {.height = 22., .bold = true});
    draw_text(canvas, margin, y + 58, group.note, kMuted);
    const int one = to_x(box, 1.);
    for (std::size_t i = 0; i < group.bars.size(); ++i) {
      const Bar& bar = group.bars[i];
      const int top = y + static_cast<int>(i) * kStep;
      if (bar.value < 0.) {
        draw_text(canvas, box.x + 12, top + 24, bar.numbers.front(),
                  {.height = 20., .color = palette::orange});
        continue;
      }
      const int end = std::max(to_x(box, bar.value), box.x + 3);
      canvas.fill({box.x, top, std::min(end, one) - box.x, kBar}, series[bar.series].second);
      if (end > one) canvas.fill({one, top, end - one, kBar}, palette::orange);
      int right = width - margin;
      for (std::size_t column = columns.size(); column-- > 0; right -= column_width(column)) {
        draw_text(canvas, right, top + 25, bar.numbers[column], kNumber);
      }
    }
    canvas.fill({one - 2, y - 10, 4, group_height(group) + 8}, palette::ink);
    canvas.fill({box.x - 1, y - 10, 2, group_height(group) + 8}, palette::muted);
  }
};

}  // namespace drawing
