// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/race.h"
#include "benchmark/comparison/report.h"
#include "benchmark/comparison/verdict.h"
#include "support/drawing/canvas.h"
#include "support/drawing/text.h"
#include "support/format.h"

/// Horizontal bars under a title, with an optional line at one value.
struct BarPanel {
  struct Bar {
    std::string label;
    double value;      ///< below 0: none
    std::string text;  ///< the value for the reader, or why there is none
    drawing::Color color;
  };
  std::string title;
  std::vector<Bar> bars;
  std::optional<double> mark{};

  static constexpr int row = 24, head = 44, foot = 22;
  int rows_height() const { return row * static_cast<int>(bars.size()); }
  int height() const { return head + rows_height() + foot; }

  void draw(drawing::Canvas& canvas, drawing::Rect area) const {
    using namespace drawing;
    constexpr TextStyle small{.height = 10.5, .color = palette::ink};
    double most = mark.value_or(0.);
    double label_width = 0., text_width_ = 0.;
    for (const Bar& bar : bars) {
      most = std::max(most, bar.value);
      label_width = std::max(label_width, text_width(bar.label, small));
      text_width_ = std::max(text_width_, text_width(bar.text, small));
    }
    const int left = area.x + static_cast<int>(label_width) + 14;
    const double width = std::max(40., area.right() - left - text_width_ - 16);
    const auto length = [&](double value) { return static_cast<int>(value / most * width + 0.5); };
    draw_text(canvas, area.x, area.y + 24, title, {.height = 14., .bold = true});
    if (mark && most > 0.) {
      canvas.fill({left + length(*mark), area.y + head - 6, 1, rows_height() + 8}, palette::ink);
    }
    int y = area.y + head;
    for (const Bar& bar : bars) {
      draw_text(canvas, left - 8, y + 15, bar.label, {.height = 10.5, .align = Align::right});
      int end = left;
      if (bar.value >= 0. && most > 0.) {
        end += std::max(1, length(bar.value));
        canvas.fill({left, y + 3, end - left, row - 7}, bar.color);
      }
      const int text_x = end + 7;  // on the line at `mark`, if it must
      canvas.fill({text_x - 3, y + 2, static_cast<int>(text_width(bar.text, small)) + 6, row - 5},
                  palette::paper);
      draw_text(canvas, text_x, y + 15, bar.text,
                {.height = 10.5, .color = bar.value < 0. ? palette::orange : palette::muted});
      y += row;
    }
    canvas.fill({left - 1, area.y + head - 4, 1, rows_height() + 6}, palette::ink);
  }
};

/// The panels in columns, under a heading.
inline drawing::Canvas draw_panels(const std::string& heading, const std::string& below,
                                   const std::vector<BarPanel>& panels, int columns,
                                   int panel_width) {
  using namespace drawing;
  constexpr int margin = 28, top = 84;
  std::vector<int> bottoms(static_cast<std::size_t>(columns), top);
  std::vector<Rect> places;
  for (const BarPanel& panel : panels) {
    const auto shortest = std::min_element(bottoms.begin(), bottoms.end());
    const auto column = static_cast<int>(shortest - bottoms.begin());
    places.push_back(
        {margin + column * (panel_width + margin), *shortest, panel_width, panel.height()});
    *shortest += panel.height();
  }
  Canvas canvas(margin + columns * (panel_width + margin),
                *std::max_element(bottoms.begin(), bottoms.end()) + 12, palette::paper);
  draw_text(canvas, margin, 38, heading, {.height = 17.5, .bold = true});
  draw_text(canvas, margin, 64, below, {.height = 11., .color = palette::muted});
  for (std::size_t i = 0; i < panels.size(); ++i) panels[i].draw(canvas, places[i]);
  return canvas;
}

inline drawing::Color color_of(const Way& way) {
  using namespace drawing;
  if (way.is_python()) return way.is_fp32() ? Color{176, 190, 208} : palette::blue;
  if (way.is_fp32()) return Color{190, 194, 200};
  if (way.casts == "raw") return palette::purple;
  if (way.casts == "audited") return Color{166, 118, 29};
  if (way.casts == "cast") return Color{90, 96, 105};
  return way.casts.starts_with("torch") ? palette::green : palette::orange;
}

/// One panel for each model, one bar for each way; `value` and `text` tell what of it.
inline drawing::Canvas draw_ways(const std::string& heading, const std::string& below,
                                 const std::deque<Race>& races,
                                 const std::function<double(const Verdict&)>& value,
                                 const std::function<std::string(const Verdict&)>& text) {
  std::vector<BarPanel> panels;
  for (const Race& race : races) {
    BarPanel panel{.title = race.title(), .bars = {}};
    for (const Verdict& verdict : judge(race)) {
      const Way& way = verdict.contestant->way();
      const bool fine = verdict.counts();
      panel.bars.push_back({way.name(), fine ? value(verdict) : -1.,
                            fine                           ? text(verdict)
                            : verdict.contestant->failed() ? "failed"
                                                           : "wrong: final loss",
                            color_of(way)});
    }
    panels.push_back(std::move(panel));
  }
  return draw_panels(heading, below, panels, races.size() > 1 ? 2 : 1, 560);
}

/// `heading`: "Time per step".
inline drawing::Canvas draw_times(const std::string& heading, const std::string& below,
                                  const std::deque<Race>& races) {
  return draw_ways(
      heading, below, races, [](const Verdict& verdict) { return verdict.seconds; },
      [](const Verdict& verdict) { return support::format_seconds(verdict.seconds); });
}

inline drawing::Canvas draw_memory(const std::string& below, const std::deque<Race>& races) {
  const auto bytes = [](const Verdict& verdict) { return verdict.contestant->peak_bytes(); };
  return draw_ways(
      "Peak memory", below, races,
      [=](const Verdict& verdict) { return static_cast<double>(bytes(verdict)); },
      [=](const Verdict& verdict) { return support::format_bytes(bytes(verdict)); });
}

/// A bar of draw_ratios() for each model.
struct RatioBar {
  const char *casts, *optimizer, *launch, *variant, *label;
  drawing::Color color;
};

/// What the README shows: the time of torchamp's ways over that of Python's torch.amp. `what`:
/// "step".
inline drawing::Canvas draw_ratios(const std::string& what, const std::string& below,
                                   const std::deque<Race>& races,
                                   const std::vector<RatioBar>& bars) {
  BarPanel panel{.title = "Less is better; the line at 1 is Python", .bars = {}, .mark = 1.};
  for (const Race& race : races) {
    const auto verdicts = judge(race);
    for (const RatioBar& bar : bars) {
      const Verdict* const best =
          best_of(verdicts, bar.casts, bar.optimizer, bar.launch, bar.variant);
      if (!best || !best->to_python) continue;
      panel.bars.push_back({race.title() + bar.label, *best->to_python,
                            support::format("%.2f", *best->to_python), bar.color});
    }
  }
  return draw_panels("torchamp's time per " + what + " over Python's torch.amp", below, {panel}, 1,
                     760);
}

inline const std::vector<RatioBar> training_bars{
    {"standard", "stock", "eager", "plain", "", drawing::palette::orange},
    {"standard", "fused", "eager", "plain", ", fused", drawing::palette::green},
    {"standard", "fused", "eager", "kept", ", fused, memory kept", drawing::palette::blue},
    {"audited", "fused", "eager", "kept", ", audited, memory kept", drawing::palette::muted},
    {"standard", "fused", "captured", "plain", ", captured", drawing::palette::purple}};

inline const std::vector<RatioBar> inference_bars{
    {"standard", "stock", "eager", "plain", "", drawing::palette::orange},
    {"standard_kept", "stock", "eager", "plain", ", casts kept", drawing::palette::green},
    {"standard_kept", "stock", "eager", "kept", ", casts and memory kept", drawing::palette::blue},
    {"narrow_kept", "stock", "eager", "kept", ", the same, all ops in 16 bits",
     drawing::palette::purple}};
