// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <filesystem>
#include <system_error>

#include "arguments.h"

namespace support {

/// Creates the folder for the option --out. Throws UsageError if it cannot be created.
inline void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw UsageError("--out: cannot make the folder '" + folder.string() + "': " + error.message());
  }
}

}  // namespace support
