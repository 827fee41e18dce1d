// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <ostream>
#include <string>
#include <utility>

#include "benchmark/comparison/contestant.h"
#include "benchmark/comparison/race.h"
#include "support/format.h"
#include "support/table.h"

inline std::int64_t sum_of(const support::OpCounts& counts) {
  std::int64_t sum = 0;
  for (const auto& [name, count] : counts) sum += count;
  return sum;
}

/// Ops that compute nothing: the languages' own ways to take parts of tensors, and the first
/// gradient's memory.
inline bool computes(const std::string& op) {
  return op != "aten::empty" && op != "aten::empty_strided" && op != "aten::narrow" &&
         op != "aten::broadcast_tensors";
}

/// "aten::add_ 73 (0)": of which ops that compute there are more in one than in the other. Empty:
/// of none.
inline std::string difference(const support::OpCounts& ours, const support::OpCounts& python) {
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> both;
  for (const auto& [name, count] : ours) both[name].first = count;
  for (const auto& [name, count] : python) both[name].second = count;
  std::string text;
  for (const auto& [name, count] : both) {
    if (count.first == count.second || !computes(name)) continue;
    text += (text.empty() ? "" : ", ") + name + " " + std::to_string(count.first) + " (" +
            std::to_string(count.second) + ")";
  }
  return text;
}

/// Counts the ops of each model in both languages: those of the loss and its gradients in fp32,
/// which have to be the same, and those of a whole step in mixed precision, where torchamp has its
/// own. Returns whether they are. Without Python there is nothing to compare with.
inline bool count_ops(std::ostream& out, const Plan& plan, const std::deque<Race>& races) {
  support::Table table({"calls of ops", "loss, backward", "Python", "mixed step", "Python"});
  std::string differences;
  for (const Race& race : races) {
    const auto count = [&](const char* language, bool whole) -> support::OpCounts {
      Way way{language, whole ? "torch" : "fp32", whole ? plan.dtypes.back() : "fp32", "fused"};
      if (way.is_python() && plan.python.empty()) return {};
      Contestant contestant(way, worker_command(plan, race, way), plan.out / "workers.log");
      contestant.wait_until_ready();
      support::OpCounts counts = contestant.count_ops(whole);
      if (contestant.failed())
        differences += "  " + way.name() + ": " + contestant.failure() + '\n';
      return counts;
    };
    const support::OpCounts ours = count("cpp", false), python = count("python", false);
    const auto number = [](const support::OpCounts& counts) {
      return counts.empty() ? std::string() : std::to_string(sum_of(counts));
    };
    table.add({race.title(), number(ours), number(python), number(count("cpp", true)),
               number(count("python", true))});
    if (python.empty()) continue;
    const std::string other = difference(ours, python);
    if (!other.empty()) differences += "  " + race.title() + ", C++ (Python): " + other + '\n';
  }
  out << table << differences;
  return differences.empty();
}
