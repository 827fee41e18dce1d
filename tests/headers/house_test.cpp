// SPDX-License-Identifier: BSD-3-Clause
// The house: floors of headers, each including only lower ones, and what a public header may bring.
// It reads the headers' text, so it knows no platform and takes no time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

constexpr int core = 7;  // the highest floor that torchamp.h brings

/// Where a header lives whose path, below torchamp/, begins so. The longest beginning decides; what
/// has none here is an extra, on floor 8.
struct Place {
  std::string_view begins;
  int floor;
};
constexpr int elsewhere = 8;
constexpr Place places[] = {
    {"version.h", 1},
    {"detail/core/base/", 1},
    // what a process has once
    {"detail/core/runtime/", 2},
    // rules and tables
    {"detail/core/policy/", 3},
    {"ops.h", 3},
    {"policy.h", 3},
    // threads' policies, regions and their kernels
    {"detail/core/autocast/", 4},
    {"autocast", 4},
    {"cast_cache.h", 4},
    {"detail/core/gradients/", 5},
    {"missing_gradients.h", 5},
    {"scaled_step.h", 5},
    {"detail/core/optim/", 6},
    {"optim.h", 6},
    {"detail/core/scaler/", 7},
    {"grad_scaler", 7},
    {"step_result.h", 7},
    {"clip_grad.h", 7},
    {"torchamp.h", 7},
};

/// What a public header may bring of torchamp's own, itself included.
struct Budget {
  std::string_view header;
  std::size_t files;
  std::size_t lines;
};
constexpr Budget budgets[] = {
    {"autocast.h", 60, 9500},
    {"optim.h", 60, 9500},
    {"grad_scaler.h", 60, 9500},
    {"torchamp.h", 90, 9900},
};
constexpr Budget all_headers = {"include/", 300, 30000};

struct Header {
  std::size_t lines = 0;
  std::set<std::string> includes;  // torchamp's
};

/// By path below torchamp/.
std::map<std::string, Header> read_headers() {
  std::map<std::string, Header> headers;
  const fs::path root = fs::path(TORCHAMP_TEST_INCLUDE_DIR) / "torchamp";
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.path().extension() != ".h") continue;
    Header& header = headers[fs::relative(entry.path(), root).generic_string()];
    std::ifstream file(entry.path());
    constexpr std::string_view directive = "#include \"torchamp/";
    for (std::string line; std::getline(file, line); ++header.lines) {
      if (!line.starts_with(directive)) continue;
      const std::string rest = line.substr(directive.size());
      header.includes.insert(rest.substr(0, rest.find('"')));
    }
  }
  return headers;
}

const std::map<std::string, Header>& headers() {
  static const auto read = read_headers();
  return read;
}

int floor_of(std::string_view header) {
  std::string_view best;
  int floor = elsewhere;
  for (const Place& place : places) {
    if (!header.starts_with(place.begins) || place.begins.size() < best.size()) continue;
    best = place.begins;
    floor = place.floor;
  }
  return floor;
}

/// All that `header` brings, itself included.
std::set<std::string> brought_by(const std::string& header) {
  std::set<std::string> brought;
  std::vector<std::string> next{header};
  while (!next.empty()) {
    const std::string now = std::move(next.back());
    next.pop_back();
    if (!brought.insert(now).second) continue;
    const auto& includes = headers().at(now).includes;
    next.insert(next.end(), includes.begin(), includes.end());
  }
  return brought;
}

std::size_t lines_of(const std::set<std::string>& some) {
  std::size_t lines = 0;
  for (const std::string& header : some) lines += headers().at(header).lines;
  return lines;
}

/// "lower -> upper" for each include from the core that goes up.
std::set<std::string> upward_includes() {
  std::set<std::string> upward;
  for (const auto& [name, header] : headers()) {
    const int floor = floor_of(name);
    if (floor > core) continue;
    for (const std::string& included : header.includes) {
      if (floor_of(included) > floor) upward.insert(name + " -> " + included);
    }
  }
  return upward;
}

TEST(House, EveryPlaceAndEveryIncludeIsAHeader) {
  for (const Place& place : places) {
    const bool any = std::any_of(headers().begin(), headers().end(), [&](const auto& header) {
      return header.first.starts_with(place.begins);
    });
    EXPECT_TRUE(any) << "no header begins with " << place.begins;
  }
  for (const auto& [name, header] : headers()) {
    for (const std::string& included : header.includes) {
      EXPECT_TRUE(headers().contains(included)) << name << " includes " << included;
    }
  }
}

TEST(House, NoHeaderOfTheCoreIncludesOneOfAHigherFloor) {
  EXPECT_THAT(upward_includes(), testing::IsEmpty());
}

TEST(House, HasFloorsThatAreCounted) {
  std::map<int, std::pair<std::size_t, std::size_t>> floors;
  for (const auto& [name, header] : headers()) {
    auto& [files, lines] = floors[floor_of(name)];
    ++files;
    lines += header.lines;
  }
  for (const auto& [floor, size] : floors) {
    std::cout << "floor " << floor << ": " << size.first << " headers, " << size.second
              << " lines\n";
  }
  EXPECT_EQ(floors.rbegin()->first, elsewhere);
}

TEST(House, WhatAHeaderBringsStaysWithinItsBudget) {
  for (const Budget& budget : budgets) {
    const std::set<std::string> brought = brought_by(std::string(budget.header));
    const std::size_t lines = lines_of(brought);
    std::cout << budget.header << ": " << brought.size() << " files of " << budget.files << ", "
              << lines << " lines of " << budget.lines << '\n';
    EXPECT_LE(brought.size(), budget.files) << budget.header;
    EXPECT_LE(lines, budget.lines) << budget.header;
  }
  std::set<std::string> all;
  for (const auto& header : headers()) all.insert(header.first);
  std::cout << "all: " << all.size() << " files of " << all_headers.files << ", " << lines_of(all)
            << " lines of " << all_headers.lines << '\n';
  EXPECT_LE(all.size(), all_headers.files);
  EXPECT_LE(lines_of(all), all_headers.lines);
}

TEST(House, ATrainingStepBringsLittleBeyondTheTrainingLoop) {
  std::set<std::string> beyond = brought_by("training_step.h");
  for (const std::string& header : brought_by("torchamp.h")) beyond.erase(header);
  std::cout << "training_step.h: " << beyond.size() << " files, " << lines_of(beyond)
            << " lines beyond torchamp.h\n";
  EXPECT_LE(beyond.size(), 12U);
  EXPECT_LE(lines_of(beyond), 1500U);
  for (const std::string& header : beyond) {
    EXPECT_FALSE(header.starts_with("distributed/") || header.find("graph") != std::string::npos)
        << header;
  }
}

}  // namespace
