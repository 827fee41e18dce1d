// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <filesystem>
#include <random>
#include <string>
#include <system_error>

namespace support {

/// A new empty folder among the system's temporary files, removed with all it holds at the end.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name) {
    std::random_device random;
    do {
      path_ = std::filesystem::temp_directory_path() / (name + '-' + std::to_string(random()));
    } while (!std::filesystem::create_directory(path_));
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace support
