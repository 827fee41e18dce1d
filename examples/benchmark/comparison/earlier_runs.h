// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "benchmark/comparison/contestant.h"
#include "benchmark/comparison/options.h"
#include "benchmark/comparison/race.h"
#include "benchmark/comparison/report.h"
#include "benchmark/comparison/way.h"
#include "support/arguments.h"
#include "support/format.h"

/// The rows of a file of comma-separated values, each by the names of the columns. Throws
/// support::UsageError.
inline std::vector<std::map<std::string, std::string>> read_rows(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw support::UsageError("--from: cannot read '" + path + "'");
  std::vector<std::map<std::string, std::string>> rows;
  std::string line;
  std::getline(file, line);
  const std::vector<std::string> names = split_list(line);
  while (std::getline(file, line)) {
    const std::vector<std::string> cells = split_list(line);
    if (cells.size() != names.size()) {
      throw support::UsageError("--from: '" + path + "' has a line of " +
                                std::to_string(cells.size()) + " values, not " +
                                std::to_string(names.size()) + ": " + line);
    }
    auto& row = rows.emplace_back();
    for (std::size_t i = 0; i < names.size(); ++i) row[names[i]] = cells[i];
  }
  return rows;
}

/// What write_csv() left of several runs, as races. Rounds of one way in several files are rounds
/// of one contestant. Throws support::UsageError.
inline std::deque<Race> read_races(const Options& options, Preset preset) {
  struct Recorded {
    Way way;
    Record record;
  };
  std::deque<Race> races;
  std::map<std::string, std::vector<Recorded>> ways;  // by the race's name
  for (const std::string& path : options.from) {
    for (auto& row : read_rows(path)) {
      if (!row.contains("seconds_per_step") || !row.contains("casts")) {
        throw support::UsageError("--from: '" + path + "' is no training.csv or inference.csv");
      }
      const std::string& name = row["model"];
      auto& recorded = ways[name];
      if (recorded.empty()) {
        const std::size_t space = name.find(' ');
        const ModelEntry& model = find_model(name.substr(0, space));
        Race& race = races.emplace_back(Race{.model = &model,
                                             .sizes = sizes_of(model, preset, options.sizes),
                                             .steps = std::stoll(row["steps"])});
        if (space != std::string::npos) race.variant = name.substr(space + 1);
      }
      const Way way{row["language"],  row["casts"],  row["dtype"],
                    row["optimizer"], row["launch"], row["variant"]};
      auto found = std::find_if(recorded.begin(), recorded.end(),
                                [&](const Recorded& one) { return one.way == way; });
      if (found == recorded.end()) found = recorded.insert(found, {way, {}});
      found->record.rounds.push_back({.seconds = support::number_of(row["seconds_per_step"]),
                                      .loss = support::number_of(row["loss"]),
                                      .peak_bytes = std::stoll(row["peak_bytes"])});
      found->record.is_wrong |= row["wrong"] == "yes";
    }
  }
  for (Race& race : races) {
    const std::string variant = race.variant.empty() ? "" : " " + race.variant;
    const std::int64_t parameters = count_parameters(race.model->make(race.sizes)->module());
    for (Recorded& one : ways[race.model->name + variant]) {
      one.record.parameters = parameters;
      race.contestants.emplace_back(std::move(one.way), std::move(one.record));
    }
  }
  return races;
}

/// A plan that measures nothing: what a report says of one.
inline Plan plan_of_earlier_runs(const Options& options, const std::deque<Race>& races,
                                 Preset preset) {
  Plan plan;
  plan.predicts = options.task == "inference";
  plan.device = options.device.device == "cuda" ? "cuda" : "cpu";
  plan.casts = options.casts;
  plan.preset = preset;
  plan.clock = options.clock;
  plan.out = options.out;
  plan.rounds = 0;
  for (const Race& race : races) {
    for (const Contestant& contestant : race.contestants) {
      plan.rounds = std::max(plan.rounds, std::ssize(contestant.rounds()));
      if (contestant.way().is_python()) plan.python = "python3";
    }
  }
  std::error_code error;
  std::filesystem::create_directories(plan.out, error);
  return plan;
}

/// What the file of --about says: "# NVIDIA H200, LibTorch 2.11.0", and below it how it was
/// measured. Throws support::UsageError.
inline Circumstances read_about(const std::string& path) {
  std::ifstream file(path);
  std::string heading;
  if (!std::getline(file, heading) || !heading.starts_with("# ")) {
    throw support::UsageError("--about: '" + path + "' does not begin with a line '# MACHINE'");
  }
  Circumstances circumstances;
  circumstances.device_name = heading.substr(2);
  circumstances.recorded = std::string(std::istreambuf_iterator<char>(file), {});
  const std::size_t begin = circumstances.recorded.find_first_not_of('\n');
  circumstances.recorded.erase(0, begin);  // npos: all
  while (circumstances.recorded.ends_with('\n')) circumstances.recorded.pop_back();
  return circumstances;
}
