// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "benchmark/comparison/race.h"
#include "benchmark/comparison/report.h"
#include "benchmark/comparison/verdict.h"
#include "support/drawing/bar_chart.h"
#include "support/drawing/canvas.h"
#include "support/format.h"

/// A bar that each model has in a chart: one way, in the dtype that is the fastest.
struct ChartSeries {
  std::string name;
  drawing::Color color;
  const char *language, *casts, *optimizer, *launch, *variant;
};

/// What a chart shows of a way, and beside what.
struct ChartOfWays {
  std::string title, below;
  std::vector<ChartSeries> series;
  std::string mark, beyond, unit;
  /// What is 1 for `verdict`; nothing: it gets no bar.
  std::function<const Contestant*(const Race&, const Verdict&)> reference;
  std::function<double(const Contestant&, const Contestant& reference)> ratio;
  std::function<std::string(const Contestant&)> text;
  std::string note_beyond;
  bool notes_reference = true;  ///< with the name of a model stands what is 1
};

/// A model's ways in a chart. A way whose loss is wrong gets a text for a bar.
inline drawing::BarChart::Group group_of(const ChartOfWays& chart, const Race& race) {
  drawing::BarChart::Group group{.name = race.model->title, .note = race.variant, .bars = {}};
  const auto verdicts = judge(race);
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const ChartSeries& one = chart.series[i];
    const Verdict* const best =
        best_of(verdicts, one.casts, one.optimizer, one.launch, one.variant, one.language);
    if (best == nullptr) {
      for (const Verdict& verdict : verdicts) {
        const Way& way = verdict.contestant->way();
        if (way.language == one.language && way.casts == one.casts && way.launch == one.launch &&
            way.optimizer == one.optimizer && way.variant == one.variant) {
          group.bars.push_back({i, -1., {one.name + ": no result that counts, see the report"}});
          break;
        }
      }
      continue;
    }
    const Contestant* const reference = chart.reference(race, *best);
    if (reference == nullptr) continue;
    const double ratio = chart.ratio(*best->contestant, *reference);
    group.bars.push_back(
        {i, ratio, {support::format("%.2f", ratio), chart.text(*best->contestant)}});
    if (chart.notes_reference) {
      group.note = (race.variant.empty() ? "" : race.variant + ", ") + chart.mark + ": " +
                   chart.text(*reference);
    }
  }
  return group;
}

inline drawing::Canvas draw(const ChartOfWays& chart, const std::deque<Race>& races) {
  drawing::BarChart bars{.title = chart.title,
                         .subtitle = chart.below,
                         .mark = chart.mark,
                         .beyond = chart.beyond,
                         .columns = {"of " + chart.mark, chart.unit}};
  std::vector<bool> is_shown(chart.series.size());
  bool is_beyond = false;
  for (const Race& race : races) {
    auto group = group_of(chart, race);
    if (group.bars.empty()) continue;
    for (const auto& bar : group.bars) {
      is_shown[bar.series] = true;
      is_beyond |= bar.value > 1.;
    }
    bars.groups.push_back(std::move(group));
  }
  std::vector<std::size_t> place(chart.series.size());
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    place[i] = bars.series.size();
    if (is_shown[i]) bars.series.emplace_back(chart.series[i].name, chart.series[i].color);
  }
  for (auto& group : bars.groups) {
    for (auto& bar : group.bars) bar.series = place[bar.series];
  }
  if (is_beyond) bars.notes.push_back(chart.note_beyond);
  return bars.draw();
}

/// LibTorch in fp32 with a fused optimizer, where there is one.
inline const Contestant* plain_fp32(const Race& race) {
  const Contestant* const fused = find(race, {"cpp", "fp32", "fp32", "fused", "eager"});
  return fused ? fused : find(race, {"cpp", "fp32", "fp32", "stock", "eager"});
}

namespace chart_colors {
inline constexpr drawing::Color python{158, 168, 184}, python_too{112, 122, 140};
inline constexpr drawing::Color ours = drawing::palette::blue, best{20, 150, 104},
                                other = drawing::palette::purple, fourth{120, 186, 226};
}  // namespace chart_colors

inline std::vector<ChartSeries> time_series(bool cuda) {
  using namespace chart_colors;
  if (cuda) {
    return {{"Python torch.amp", python, "python", "torch", "fused", "eager", "plain"},
            {"Python, captured", python_too, "python", "torch", "fused", "captured", "plain"},
            {"torchamp", ours, "cpp", "standard", "fused", "eager", "plain"},
            {"torchamp, captured", best, "cpp", "standard", "fused", "captured", "plain"}};
  }
  return {{"Python torch.amp", python, "python", "torch", "fused", "eager", "plain"},
          {"torchamp", ours, "cpp", "standard", "fused", "eager", "plain"},
          {"torchamp, audited policy", other, "cpp", "audited", "fused", "eager", "plain"}};
}

/// Time per step, relative to fp32.
inline drawing::Canvas draw_times(const std::string& below, const std::deque<Race>& races,
                                  bool cuda) {
  const auto fp32 = [](const Race& race, const Verdict&) { return plain_fp32(race); };
  const auto text = [](const Contestant& contestant) {
    return support::format_seconds(median_seconds(contestant));
  };
  return draw({.title = "Time per training step relative to fp32: shorter is faster",
               .below = below + ". Fused optimizers",
               .series = time_series(cuda),
               .mark = "fp32",
               .beyond = "slower than fp32",
               .unit = "per step",
               .reference = fp32,
               .ratio = time_ratio,
               .text = text,
               .note_beyond =
                   cuda ? "Slower than fp32: the host sets the pace, and each cast is one more "
                          "launch. A captured step is launched at once."
                        : "Slower than fp32: conversions cost more than 16 bits save in products."},
              races);
}

/// Peak memory of training, relative to fp32.
inline drawing::Canvas draw_memory(const std::string& below, const std::deque<Race>& races) {
  using namespace chart_colors;
  const auto bytes = [](const Contestant& contestant) {
    return static_cast<double>(contestant.peak_bytes());
  };
  const auto fp32 = [](const Race& race, const Verdict&) { return plain_fp32(race); };
  return draw(
      {.title = "Peak memory of training relative to fp32: shorter is less",
       .below = below + ". Fused optimizers",
       .series = {{"Python torch.amp", python, "python", "torch", "fused", "eager", "plain"},
                  {"torchamp", ours, "cpp", "standard", "fused", "eager", "plain"},
                  {"master weights", fourth, "cpp", "standard", "fused", "eager", "masters"},
                  {"recomputed", best, "cpp", "standard", "fused", "eager", "recomputed"}},
       .mark = "fp32",
       .beyond = "more than fp32",
       .unit = "at the peak",
       .reference = fp32,
       .ratio = [=](const Contestant& a, const Contestant& b) { return bytes(a) / bytes(b); },
       .text = [](const Contestant& c) { return support::format_bytes(c.peak_bytes()); },
       .note_beyond = "More than fp32: 16-bit copies of the weights, where activations are few."},
      races);
}

/// torchamp's time per step over that of Python's torch.amp in the same dtype, with the same kind
/// of optimizer, launched alike.
inline drawing::Canvas draw_ratios(const std::string& below, const std::deque<Race>& races,
                                   bool cuda) {
  using namespace chart_colors;
  std::vector<ChartSeries> series{
      {"LibTorch's own optimizer", fourth, "cpp", "standard", "stock", "eager", "plain"},
      {"fused optimizer", ours, "cpp", "standard", "fused", "eager", "plain"}};
  if (cuda) {
    series.push_back({"both captured", best, "cpp", "standard", "fused", "captured", "plain"});
  }
  const auto twin = [](const Race& race, const Verdict& verdict) {
    const Way& way = verdict.contestant->way();
    Way python = python_twin(way);
    python.launch = way.launch;
    return find(race, python);
  };
  return draw({.title = "torchamp's time over that of Python's torch.amp: shorter is faster",
               .below = below + ". Same dtype, same kind of optimizer",
               .series = std::move(series),
               .mark = "Python",
               .beyond = "slower than Python",
               .unit = "per step",
               .reference = twin,
               .ratio = time_ratio,
               .text =
                   [](const Contestant& contestant) {
                     return support::format_seconds(median_seconds(contestant));
                   },
               .note_beyond =
                   cuda ? "LibTorch's own optimizers step parameter by parameter, Python's all at "
                          "once. The report explains the rest."
                        : "A few percent are within the noise of the rounds.",
               .notes_reference = false},
              races);
}
