// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/processes.h"
#include "benchmark/comparison/report.h"
#include "benchmark/comparison/verdict.h"
#include "support/drawing/canvas.h"
#include "support/drawing/text.h"
#include "support/drawing/ticks.h"
#include "support/format.h"

/// The median over the rounds of `value(gang, round)`.
template <class Value>
double median_of(const Gang& gang, const Value& value) {
  std::vector<double> values;
  for (std::size_t round = 0; round < gang.rounds(); ++round) values.push_back(value(gang, round));
  return median(std::move(values));
}

/// A line for each way, measured by Python's.
inline void write_group_table(std::ostream& out, const GroupRace& race) {
  using support::format;
  const auto seconds = [](const Gang& gang, std::size_t round) { return gang.seconds(round); };
  const auto processor = [](const Gang& gang, std::size_t round) { return gang.processor(round); };
  const auto sent = [&](const Gang& gang, std::size_t round) {
    return gang.sent_bytes(round) / static_cast<double>(race.race->steps);
  };
  out << "\n| way | time | Python's | processor | Python's | sent | at least | memory | loss |\n"
         "|---|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  for (const Gang& gang : race.gangs) {
    const std::string wrong = race.wrong(gang);
    out << "| " << gang.way().name() << " | ";
    if (!gang.failure().empty()) {
      out << wrong << " | | | | | | | |\n";
      continue;
    }
    const Gang* const python = race.twin_of(gang);
    const auto times = [&](const auto& value, bool counts) {
      if (!counts) return std::string(" | ");
      const double own = median_of(gang, value);
      return support::format_seconds(own) + " | " +
             (python ? format("%.2f", own / median_of(*python, value)) : "");
    };
    const double bytes = median_of(gang, sent);
    out << times(seconds, race.has_cores) << " | " << times(processor, true) << " | "
        << (bytes < 0. ? "" : with_commas(static_cast<std::int64_t>(bytes + 0.5))) << " | "
        << with_commas(static_cast<std::int64_t>(
               least_sent(gang.way(), gang.parameters(), race.processes) + 0.5))
        << " | " << support::format_bytes(gang.peak_bytes()) << " | "
        << format("%.4f", gang.final_loss()) << (wrong.empty() ? "" : ", wrong: " + wrong)
        << " |\n";
  }
}

inline void write_processes_report(std::ostream& out, const Plan& plan,
                                   const Circumstances& circumstances,
                                   const std::deque<GroupRace>& races, bool has_picture) {
  out << circumstances.device << ' ' << plan.rounds
      << " rounds, over Gloo on one machine. Made by\n\n"
      << "    " << circumstances.command << "\n\n"
      << "Medians over the rounds, of one step. *time* is the slowest process's, where there is a "
         "core for each thread of each process. *processor* and\n*sent* are processor time and "
         "the bytes given to sockets, averages over the processes; *at least* is what the method "
         "must send. *Python's* is the\nratio to Python's counterpart. *memory* is by how much the "
         "largest process has grown. All start from the same weights and take the same batches, "
         "so\ntheir losses agree.\n"
         "`fully_shard` gathers the weights once a step (`reshard_after_forward=False`).\n";
  if (has_picture) {
    out << "\nWhat process 0 has sent, added up over one step; shaded: the last micro-batch's "
           "backward.\n\n![Sent](processes.png)\n";
  }
  for (const GroupRace& race : races) {
    out << "\n### " << race.race->title() << ", "
        << (race.processes == 1 ? "1 process" : std::to_string(race.processes) + " processes")
        << "\n\n"
        << with_commas(race.gangs.back().parameters()) << " parameters ("
        << sizes_text(race.race->sizes) << "), " << race.race->steps << " steps a round\n";
    write_group_table(out, race);
  }
}

inline void write_processes_csv(std::ostream& out, const std::deque<GroupRace>& races) {
  out << "model,processes,language,variant,dtype,round,steps,seconds_per_step,processor_per_step,"
         "sent_per_step,least_sent,peak_bytes,loss,wrong\n";
  for (const GroupRace& race : races) {
    const auto steps = static_cast<double>(race.race->steps);
    for (const Gang& gang : race.gangs) {
      const Way& way = gang.way();
      const std::string wrong = race.wrong(gang).empty() ? "no" : "yes";
      for (std::size_t round = 0; round < gang.rounds(); ++round) {
        const double sent = gang.sent_bytes(round);
        out << race.race->model->name << ',' << race.processes << ',' << way.language << ','
            << way.variant << ',' << way.dtype << ',' << round + 1 << ',' << race.race->steps << ','
            << support::format("%.9g,%.9g,", gang.seconds(round), gang.processor(round))
            << (sent < 0. ? "" : support::format("%.0f", sent / steps)) << ','
            << support::format("%.0f,%lld,%.9g,",
                               least_sent(way, gang.parameters(), race.processes),
                               static_cast<long long>(gang.peak_bytes()), gang.loss(round))
            << wrong << '\n';
      }
    }
  }
}

/// The race to draw: of two processes or, where there is none, of the fewest.
inline const GroupRace* drawn_race(const std::deque<GroupRace>& races) {
  const GroupRace* drawn = nullptr;
  for (const GroupRace& race : races) {
    bool has_sent = false;
    for (const Gang& gang : race.gangs) {
      has_sent |= gang.step_trace() && !gang.step_trace()->sent.empty();
    }
    if (has_sent && (!drawn || race.processes < drawn->processes)) drawn = &race;
  }
  return drawn;
}

/// What was sent when, added up over a step of `longest` seconds at most.
inline void draw_trace(drawing::Canvas& canvas, drawing::Rect area, const std::string& title,
                       drawing::Color color, const StepTrace& trace, double longest, double most) {
  using namespace drawing;
  const Rect box{area.x + 92, area.y + 40, area.width - 92 - 24, area.height - 40 - 62};
  const auto to_x = [&](double seconds) { return box.x + seconds / longest * box.width; };
  const auto to_y = [&](double bytes) { return box.bottom() - bytes / most * box.height; };
  const auto shade = [&](double from, double to, Color with) {
    const int left = static_cast<int>(to_x(from));
    canvas.fill({left, box.y, static_cast<int>(to_x(to)) - left, box.height}, with);
  };
  shade(trace.forward, trace.backward, palette::faint_rule);
  draw_text(canvas, box.x, area.y + 26, title, {.height = 12., .bold = true});
  for (const Tick& tick : linear_ticks(0., longest * 1e3, 8)) {
    const int x = static_cast<int>(to_x(tick.value * 1e-3));
    canvas.fill({x, box.bottom(), 1, 6}, palette::ink);
    draw_text_within(canvas, area, x, box.bottom() + 22, tick.label, {.height = 11.});
  }
  for (const Tick& tick : linear_ticks(0., most * 1e-6, 4)) {
    const int y = static_cast<int>(to_y(tick.value * 1e6));
    canvas.fill({box.x, y, box.width, 1}, palette::rule);
    draw_text(canvas, box.x - 10, y + 5, tick.label, {.height = 11., .align = Align::right});
  }
  draw_text(canvas, box.x + box.width / 2., box.bottom() + 46, "milliseconds",
            {.height = 11., .color = palette::muted, .align = Align::centre});
  draw_text_upwards(canvas, area.x + 26, box.y + box.height / 2., "megabytes sent",
                    {.height = 11., .color = palette::muted, .align = Align::centre});
  Polyline line{{to_x(0.), to_y(0.)}};
  double bytes = 0.;
  for (const auto& [when, sent] : trace.sent) {
    line.push_back({to_x(when), to_y(bytes)});
    bytes += static_cast<double>(sent);
    line.push_back({to_x(when), to_y(bytes)});
  }
  line.push_back({to_x(trace.end), to_y(bytes)});
  canvas.stroke({line}, 2., color);
  canvas.fill({static_cast<int>(to_x(trace.end)), box.y, 1, box.height}, palette::muted);
  canvas.fill({box.x, box.y, 1, box.height}, palette::ink);
  canvas.fill({box.x, box.bottom() - 1, box.width, 1}, palette::ink);
}

/// Ours at the left, Python's at the right, all of one scale.
inline drawing::Canvas draw_processes(const std::string& below, const GroupRace& race) {
  using namespace drawing;
  double longest = 0., most = 1.;
  std::vector<const Gang*> columns[2];
  for (const Gang& gang : race.gangs) {
    if (!gang.step_trace()) continue;
    columns[gang.way().is_python() ? 1 : 0].push_back(&gang);
    longest = std::max(longest, gang.step_trace()->end);
    double bytes = 0.;
    for (const auto& [when, sent] : gang.step_trace()->sent) bytes += static_cast<double>(sent);
    most = std::max(most, bytes);
  }
  constexpr int width = 620, height = 250, top = 84;
  const auto rows = static_cast<int>(std::max(columns[0].size(), columns[1].size()));
  const int across = columns[1].empty() ? 1 : 2;
  Canvas canvas(across * width, top + rows * height, palette::paper);
  draw_text(
      canvas, 28, 38,
      support::format("What is sent when, %lld processes", static_cast<long long>(race.processes)),
      {.height = 17.5, .bold = true});
  draw_text(canvas, 28, 64, below + ". Shaded: backward", {.height = 11., .color = palette::muted});
  for (int column = 0; column < 2; ++column) {
    for (std::size_t row = 0; row < columns[column].size(); ++row) {
      const Gang& gang = *columns[column][row];
      draw_trace(canvas, {column * width, top + static_cast<int>(row) * height, width, height},
                 gang.way().name(), column == 0 ? palette::blue : palette::orange,
                 *gang.step_trace(), longest * 1.02, most * 1.05);
    }
  }
  return canvas;
}
