// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>

/// A chapter of report.md, the page of a machine: what one task has measured there.
struct Chapter {
  std::string_view task, title;
};
inline constexpr std::array<Chapter, 6> chapters{{{"training", "## Training\n"},
                                                  {"inference", "## Inference\n"},
                                                  {"scripts", "## Scripts\n"},
                                                  {"processes", "## Several processes\n"},
                                                  {"growth", "## Growth\n"},
                                                  {"by hand", "## Beside the comparison\n"}}};

/// `page` with `text` as the chapter of `task`, in the order of `chapters`; the other chapters
/// stay.
inline std::string with_chapter(const std::string& page, std::string_view task,
                                const std::string& title, const std::string& text) {
  std::string result = "# Mixed precision on " + title + '\n';
  for (const Chapter& chapter : chapters) {
    if (chapter.task == task) {
      result += '\n' + std::string(chapter.title) + '\n' + text;
      while (result.ends_with("\n\n")) result.pop_back();
      continue;
    }
    const std::size_t begin = page.find("\n" + std::string(chapter.title));
    if (begin == std::string::npos) continue;
    const std::size_t end = page.find("\n\n## ", begin + 1);
    result += page.substr(begin, end == std::string::npos ? end : end + 1 - begin);
  }
  return result;
}

/// Writes `text` as the chapter of `task` into the page in `folder`.
inline void write_chapter(const std::filesystem::path& folder, std::string_view task,
                          const std::string& title, const std::string& text) {
  const std::filesystem::path path = folder / "report.md";
  std::ifstream before(path);
  const std::string page{std::istreambuf_iterator<char>(before), {}};
  std::ofstream(path) << with_chapter(page, task, title, text);
  std::cout << "Wrote " << path.string() << '\n';
}
