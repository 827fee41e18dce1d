// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <deque>
#include <ostream>
#include <string>

#include "benchmark/comparison/contestant.h"
#include "benchmark/comparison/race.h"
#include "support/format.h"
#include "support/op_count.h"
#include "support/table.h"

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
      return counts.empty() ? std::string() : std::to_string(support::sum_of(counts));
    };
    table.add({race.title(), number(ours), number(python), number(count("cpp", true)),
               number(count("python", true))});
    if (python.empty()) continue;
    const std::string other = support::difference(ours, python);
    if (!other.empty()) differences += "  " + race.title() + ", C++ (Python): " + other + '\n';
  }
  out << table << differences;
  return differences.empty();
}
