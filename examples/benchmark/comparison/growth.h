// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/child_process.h"
#include "benchmark/comparison/growth_costs.h"
#include "benchmark/comparison/race.h"
#include "benchmark/comparison/report.h"
#include "support/format.h"

/// Seconds by size.
using Curve = std::map<std::int64_t, double>;

/// A cost in both languages; Python's curve is empty where it has no such thing.
struct GrownCost {
  std::string axis, name;
  Curve ours, python;
};

/// The power of the size by which a curve grows: from the size that is a tenth of the last one, or
/// the next above it, to the last.
inline std::optional<double> growth_power(const Curve& curve) {
  if (curve.size() < 2) return std::nullopt;
  const auto last = std::prev(curve.end());
  auto from = curve.lower_bound(last->first / 16);
  if (from == last) from = std::prev(last);
  const double sizes = static_cast<double>(last->first) / static_cast<double>(from->first);
  return std::log(last->second / from->second) / std::log(sizes);
}

inline void keep_least(Curve& curve, std::int64_t size, double seconds) {
  const auto [at, is_new] = curve.try_emplace(size, seconds);
  if (!is_new) at->second = std::min(at->second, seconds);
}

/// Measures all costs in turns with Python's, `plan.rounds` times; the least time of each counts.
/// Sizes above `largest` are passed over.
inline std::vector<GrownCost> measure_growth(const Plan& plan, std::int64_t largest) {
  at::set_num_threads(1);
  const std::vector<GrowingCost> costs = growing_costs();
  std::vector<GrownCost> grown;
  for (const GrowingCost& cost : costs) grown.push_back({cost.axis, cost.name, {}, {}});
  for (std::int64_t round = 0; round < plan.rounds; ++round) {
    for (std::size_t i = 0; i < costs.size(); ++i) {
      std::cout << "round " << round + 1 << ": " << costs[i].name << ", " << costs[i].axis << '\n';
      for (const std::int64_t size : costs[i].sizes) {
        if (size <= largest) keep_least(grown[i].ours, size, seconds_of(costs[i].make(size)));
      }
    }
    if (plan.python.empty()) continue;
    const auto script = std::filesystem::path(plan.worker_script).replace_filename("growth.py");
    ChildProcess python({plan.python, "-B", script.string(), "--largest", std::to_string(largest)},
                        plan.out / "workers.log");
    while (const auto line = python.read_line()) {
      std::istringstream fields(*line);
      std::string axis, name, size, seconds;
      std::getline(std::getline(fields, axis, ','), name, ',');
      std::getline(std::getline(fields, size, ','), seconds);
      for (GrownCost& cost : grown) {
        if (cost.axis != axis || cost.name != name) continue;
        keep_least(cost.python, std::stoll(size), support::number_of(seconds));
      }
    }
  }
  return grown;
}

/// One line for each cost.
inline void write_growth_report(std::ostream& out, const Plan& plan,
                                const Circumstances& circumstances,
                                const std::vector<GrownCost>& costs) {
  using support::format;
  const auto microseconds = [](double seconds) { return format("%.3g", seconds * 1e6); };
  const auto power = [](const Curve& curve) {
    const auto found = growth_power(curve);
    return found ? format("%.2f", *found) : std::string();
  };
  out << circumstances.device << ' ' << plan.rounds << " rounds. Made by\n\n    "
      << circumstances.command << "\n\n"
      << "Microseconds of processor time of one thread, the least of the rounds. \"Step + "
         "update\" is the scaler's part, with scale(): the optimizers\nhave no work of their own, "
         "but for "
         "`optimizer.step()`, torch.optim.SGD's, to which the others are added. A cost grows with "
         "the\n*power* of the size, measured over the last decade: 0 is constant, 1 proportional. "
         "Python is torch.amp.\n";
  std::string axis;
  for (const GrownCost& cost : costs) {
    if (cost.ours.empty()) continue;
    const auto [low, at_low] = *cost.ours.begin();
    const auto [high, at_high] = *cost.ours.rbegin();
    if (cost.axis != axis) {
      axis = cost.axis;
      out << "\n| " << axis << " | at " << low << " | Python | at " << high
          << " | Python | power | Python |\n|---|---:|---:|---:|---:|---:|---:|\n";
    }
    const bool python = !cost.python.empty();
    out << "| " << cost.name << " | " << microseconds(at_low) << " | "
        << (python ? microseconds(cost.python.begin()->second) : "") << " | "
        << microseconds(at_high) << " | "
        << (python ? microseconds(cost.python.rbegin()->second) : "") << " | " << power(cost.ours)
        << " | " << power(cost.python) << " |\n";
  }
}

inline void write_growth_csv(std::ostream& out, const std::vector<GrownCost>& costs) {
  out << "axis,cost,language,size,seconds\n";
  for (const GrownCost& cost : costs) {
    for (const auto& [language, curve] : {std::pair{"cpp", &cost.ours}, {"python", &cost.python}}) {
      for (const auto& [size, seconds] : *curve) {
        out << cost.axis << ',' << cost.name << ',' << language << ',' << size << ','
            << support::format("%.6g", seconds) << '\n';
      }
    }
  }
}
