// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "image.h"

namespace drawing {

namespace detail {

inline void append_big_endian(std::string& bytes, std::uint32_t value) {
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift & 0xFFU);
}

/// One part of a PNG file: length, type, contents, checksum (CRC-32 of ISO 3309).
inline void append_chunk(std::string& file, std::string_view type, std::string_view contents) {
  append_big_endian(file, static_cast<std::uint32_t>(contents.size()));
  const std::size_t checked_from = file.size();
  file.append(type).append(contents);
  std::uint32_t crc = 0xFFFFFFFFU;
  for (std::size_t i = checked_from; i < file.size(); ++i) {
    crc ^= static_cast<unsigned char>(file[i]);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1U ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
  }
  append_big_endian(file, ~crc);
}

/// `bytes` as a zlib stream (RFC 1950) of blocks that are stored, not compressed.
inline std::string zlib_stored(std::string_view bytes) {
  std::string stream = "\x78\x01";
  std::uint32_t low = 1, high = 0;  // the sums of Adler-32
  for (std::size_t from = 0; from < bytes.size(); from += 0xFFFF) {
    const std::string_view block = bytes.substr(from, 0xFFFF);
    const auto size = static_cast<std::uint32_t>(block.size());
    stream += from + block.size() == bytes.size() ? '\1' : '\0';
    for (const std::uint32_t value : {size, ~size}) {
      stream += static_cast<char>(value & 0xFFU);
      stream += static_cast<char>(value >> 8U & 0xFFU);
    }
    stream += block;
    for (const char byte : block) {
      low = (low + static_cast<unsigned char>(byte)) % 65521U;
      high = (high + low) % 65521U;
    }
  }
  append_big_endian(stream, high << 16U | low);
  return stream;
}

}  // namespace detail

/// Writes `image` as a PNG file without compression and without any library: what the examples do
/// where they are built without libpng. Returns whether it went well.
inline bool write_png_stored(const std::filesystem::path& path, const Image& image) {
  std::string header;
  detail::append_big_endian(header, static_cast<std::uint32_t>(image.width));
  detail::append_big_endian(header, static_cast<std::uint32_t>(image.height));
  header += '\x08';                             // bits a sample
  header += image.channels == 3 ? '\2' : '\0';  // RGB or grey
  header.append(3, '\0');                       // the usual compression, filters and no interlace
  std::string rows;
  const auto row_size = static_cast<std::size_t>(image.width * image.channels);
  for (std::size_t from = 0; from < image.pixels.size(); from += row_size) {
    rows += '\0';  // no filter
    rows.append(reinterpret_cast<const char*>(image.pixels.data()) + from, row_size);
  }
  std::string file = "\x89PNG\r\n\x1a\n";
  detail::append_chunk(file, "IHDR", header);
  detail::append_chunk(file, "IDAT", detail::zlib_stored(rows));
  detail::append_chunk(file, "IEND", "");
  std::ofstream out(path, std::ios::binary);
  return static_cast<bool>(
      out.write(file.data(), static_cast<std::streamsize>(file.size())).flush());
}

}  // namespace drawing
