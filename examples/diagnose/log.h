// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "support/arguments.h"

/// A step of training, as TrainingStepOptions::log writes it. What is not known is NaN.
struct LoggedStep {
  double step = 0.;
  double loss = std::numeric_limits<double>::quiet_NaN(), scale = 1.;
  bool skipped = false;
  double norm = std::numeric_limits<double>::quiet_NaN();     ///< of the gradients, before clipping
  double seconds = std::numeric_limits<double>::quiet_NaN();  ///< that it took
};

/// The steps of such a file, each once: a run that went on from its file has made some again, and
/// the last counts. Throws support::UsageError.
inline std::vector<LoggedStep> read_log(const std::filesystem::path& path) {
  const auto check = [&](bool right, const std::string& what) {
    if (!right) throw support::UsageError("--log: '" + path.string() + "' " + what);
  };
  std::ifstream file(path);
  std::string line;
  check(file && std::getline(file, line), "cannot be read, or is empty");
  constexpr std::string_view head = "step,loss,scale,skipped,norm,time";
  check(line == head, "does not begin with '" + std::string(head) + "'");
  std::vector<LoggedStep> steps;
  double time = 0.;  // since the TrainingStep was made
  while (std::getline(file, line)) {
    std::vector<double> numbers;
    for (std::size_t begin = 0; begin <= line.size();) {
      const auto end = std::min(line.find(',', begin), line.size());
      const std::string cell = line.substr(begin, end - begin);
      char* rest = nullptr;
      const double number = std::strtod(cell.c_str(), &rest);
      check(*rest == '\0', "has '" + cell + "' for a number");
      numbers.push_back(cell.empty() ? std::numeric_limits<double>::quiet_NaN() : number);
      begin = end + 1;
    }
    if (numbers.size() != 6 && file.eof()) break;  // the run is still writing it, or was killed
    check(numbers.size() == 6, "has '" + line + "' for the six numbers of a step");
    if (numbers[5] < time) time = 0.;  // of another TrainingStep
    while (!steps.empty() && steps.back().step >= numbers[0]) steps.pop_back();
    steps.push_back({.step = numbers[0],
                     .loss = numbers[1],
                     .scale = numbers[2],
                     .skipped = numbers[3] != 0.,
                     .norm = numbers[4],
                     .seconds = numbers[5] - time});
    time = numbers[5];
  }
  check(!steps.empty(), "has no steps yet");
  return steps;
}
