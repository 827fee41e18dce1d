// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string>

#include "torchamp/detail/extras/io/archive_file.h"

/// The bytes of an archive, sealed like a TrainingCheckpoint.
inline std::string sealed(const std::string& bytes) {
  std::string result;
  torchamp::detail::SealedWriter writer([&](const void* data, std::size_t size) {
    result.append(static_cast<const char*>(data), size);
  });
  writer.add(bytes.data(), bytes.size());
  writer.finish();
  return result;
}
