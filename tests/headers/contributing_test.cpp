// SPDX-License-Identifier: BSD-3-Clause
// What .github/CONTRIBUTING.md names exists: files, functions, tests. A word in capitals (NAME)
// stands for any.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/temporary_folder.h"

namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;
using ::testing::Not;

const fs::path& project() {
  static const fs::path path = TORCHAMP_TEST_ROOT;
  return path;
}

const std::string& page() {
  static const std::string text = content_of(project() / ".github" / "CONTRIBUTING.md");
  return text;
}

/// The lines of the page from "## `title`" to the next section.
std::vector<std::string> section(const std::string& title) {
  std::vector<std::string> lines;
  std::istringstream text(page());
  bool inside = false;
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("## ")) {
      inside = line == "## " + title;
    } else if (inside) {
      lines.push_back(line);
    }
  }
  return lines;
}

/// The folders in which a path of the page may begin.
const std::vector<fs::path>& beginnings() {
  static const std::vector<fs::path> folders{
      project() / "include" / "torchamp", project(),
      project() / "include" / "torchamp" / "detail" / "core",
      project() / "include" / "torchamp" / "detail" / "extras", project() / "include"};
  return folders;
}

bool is_file_or_folder(const std::string& path) {
  for (const fs::path& folder : beginnings()) {
    if (fs::exists(folder / path)) return true;
  }
  return false;
}

/// All of the project's own text, names of files included.
const std::string& all_texts() {
  static const std::string texts = [] {
    std::string all;
    for (const char* folder : {"include", "tests", "cmake", "examples", ".ci", ".github"}) {
      for (const auto& entry : fs::recursive_directory_iterator(project() / folder)) {
        const fs::path& path = entry.path();
        if (!entry.is_regular_file() || path.filename() == "CONTRIBUTING.md") continue;
        all += path.filename().string() + '\n';
        if (path.extension() == ".png" || path.filename() == "contributing_test.cpp") continue;
        all += content_of(path) + '\n';
      }
    }
    return all + content_of(project() / "CMakeLists.txt") +
           content_of(project() / "CMakePresets.json");
  }();
  return texts;
}

bool is_word_of(const std::string& text, const std::string& word) {
  const auto is_part = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  };
  for (std::size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    if ((at == 0 || !is_part(text[at - 1])) && (end == text.size() || !is_part(text[end]))) {
      return true;
    }
  }
  return false;
}

/// "edit" of "Policy::edit(rule)".
std::string last_name(std::string name) {
  name = name.substr(0, name.find('('));
  return name.substr(name.rfind(':') + 1);
}

/// What the page has between two backticks, on one line.
std::vector<std::string> named() {
  static const std::regex quoted("`([^`\n]+)`");
  std::vector<std::string> names;
  for (auto at = std::sregex_iterator(page().begin(), page().end(), quoted);
       at != std::sregex_iterator(); ++at) {
    names.push_back((*at)[1]);
  }
  return names;
}

bool has_placeholder(const std::string& name) {
  static const std::regex placeholder("NAME|TOPIC|FOLDER|SUMMARY|LIBTORCH");
  return std::regex_search(name, placeholder) && !name.starts_with("TORCHAMP");
}

TEST(Contributing, NamesFilesThatExist) {
  static const std::regex path(R"([\w./-]+/[\w./-]*|[\w-]+\.(h|cpp|py|txt|md|cmake))");
  std::size_t count = 0;
  for (const std::string& name : named()) {
    if (!std::regex_match(name, path) || has_placeholder(name)) continue;
    if (name.starts_with("torch/")) continue;        // LibTorch's
    if (name.find("build/") != name.npos) continue;  // made by a build
    ++count;
    // A file may be named alone if its folder has been named before.
    const bool exists =
        is_file_or_folder(name) ||
        (name.find('/') == name.npos && all_texts().find('\n' + name + '\n') != std::string::npos);
    EXPECT_TRUE(exists) << name << " does not exist";
  }
  EXPECT_GT(count, 40U);
}

TEST(Contributing, NamesFunctionsAndTestsThatExist) {
  static const std::regex code(R"(~?(\w+::)*\w+(\([^)]*\))?)");
  std::size_t count = 0;
  for (const std::string& name : named()) {
    if (!std::regex_match(name, code) || has_placeholder(name)) continue;
    const std::string last = last_name(name);
    const bool is_code =
        last.find('_') != last.npos || last != name ||
        (last.size() > 1 && std::isupper(static_cast<unsigned char>(last[0])) != 0);
    if (!is_code) continue;
    ++count;
    EXPECT_TRUE(is_word_of(all_texts(), last)) << name << " is nowhere";
  }
  EXPECT_GT(count, 60U);
}

/// The lines of the two trips: "  resolve     options -> RegionState", in the files that they name.
struct Step {
  std::string names;
  std::string rest;
};

std::vector<Step> steps() {
  // A line with more spaces continues the line before it.
  static const std::regex step(R"(^ {0,30}(\S.*?)(?:  +(\S.*))?$)");
  std::vector<Step> found;
  std::istringstream text(page().substr(0, page().find("## What to run")));
  bool inside = false;
  int blocks = 0;
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("```")) {
      inside = !inside;
      blocks += inside ? 1 : 0;
      continue;
    }
    std::smatch parts;
    // The first block is the drawing.
    if (inside && blocks > 1 && std::regex_match(line, parts, step)) {
      found.push_back({parts[1], parts[2]});
    }
  }
  return found;
}

TEST(Contributing, DrawsPathsByFunctionsThatExistThere) {
  static const std::regex file(R"((\w+/)*[\w-]+\.h\b)");
  static const std::regex arguments(R"(\([^)]*\))");
  std::string at;
  std::size_t count = 0;
  for (const Step& step : steps()) {
    if (step.rest.starts_with("LibTorch") || step.names.starts_with("or ")) continue;
    std::smatch found;
    if (std::regex_search(step.rest, found, file)) at = found.str();
    const auto folder =
        std::find_if(beginnings().begin(), beginnings().end(),
                     [&](const fs::path& one) { return fs::is_regular_file(one / at); });
    ASSERT_NE(folder, beginnings().end()) << at << " does not exist";
    const std::string text = content_of(*folder / at);
    std::istringstream names(std::regex_replace(step.names, arguments, ""));
    for (std::string name; std::getline(names, name, ',');) {
      const std::string last = last_name(name.substr(name.find_first_not_of(' ')));
      ++count;
      // If a step's line names no file, the step is in the file of the outer step.
      EXPECT_TRUE(is_word_of(text, last) || (found.empty() && is_word_of(all_texts(), last)))
          << name << " is not in " << at;
    }
  }
  EXPECT_GT(count, 25U);
}

// Whoever adds one thing edits four files at most, and learns of the rest from tests.
TEST(Contributing, AsksForFourFilesAtMostForAnAddition) {
  static const std::regex item(R"(^\d\. `([^`]+)`.*)");
  for (const char* title : {"The default rule of an op", "A kind of rule", "A preset of the policy",
                            "An optimizer", "A preset of the scaler", "A device", "An extra"}) {
    std::set<std::string> files;
    for (const std::string& line : section(title)) {
      std::smatch parts;
      if (std::regex_match(line, parts, item)) files.insert(parts[1]);
    }
    EXPECT_THAT(files, Not(IsEmpty())) << title;
    EXPECT_LE(files.size(), 4U) << title;
    for (const std::string& file : files) {
      EXPECT_TRUE(has_placeholder(file) || is_file_or_folder(file)) << title << ": " << file;
    }
  }
}

}  // namespace
