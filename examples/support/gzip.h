// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <zlib.h>

#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>

namespace support {

/// Unpacks a gzip file. Throws std::runtime_error for a broken file and for a full disk.
inline void unpack_gzip(const std::filesystem::path& from, const std::filesystem::path& to) {
  const std::unique_ptr<gzFile_s, decltype(&gzclose)> in(gzopen(from.c_str(), "rb"), &gzclose);
  if (!in) throw std::runtime_error("cannot open '" + from.string() + "'");
  std::ofstream out(to, std::ios::binary);
  std::array<char, 1 << 16> buffer;
  int count = 0;
  while ((count = gzread(in.get(), buffer.data(), buffer.size())) > 0) {
    out.write(buffer.data(), count);
  }
  int error = Z_OK;
  const char* const why = gzerror(in.get(), &error);
  // Z_BUF_ERROR: the file ends in the middle of its data.
  if (count < 0 || error == Z_BUF_ERROR) {
    throw std::runtime_error("cannot unpack '" + from.string() + "': " + why);
  }
  if (!out.flush()) throw std::runtime_error("cannot write '" + to.string() + "'");
}

}  // namespace support
