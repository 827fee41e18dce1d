// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <system_error>

/// An empty folder that is removed at the end. In the processes that a test starts with its
/// environment(), it is the folder of that test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    if (const char* const given = std::getenv("TORCHAMP_TEST_FOLDER")) {
      path_ = given;
      return;
    }
    std::random_device random;
    do {
      path_ = std::filesystem::temp_directory_path() / ("torchamp-" + std::to_string(random()));
    } while (!std::filesystem::create_directory(path_));
    is_ours_ = true;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;  // some systems keep what is open
    if (is_ours_) std::filesystem::remove_all(path_, ignored);
  }

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::map<std::string, std::string> environment() const {
    return {{"TORCHAMP_TEST_FOLDER", path_.string()}};
  }
  int files() const {
    int count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(path_)) ++count;
    return count;
  }

 private:
  std::filesystem::path path_;
  bool is_ours_ = false;
};

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
