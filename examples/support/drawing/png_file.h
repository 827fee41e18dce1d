// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

#include "image.h"

#if defined(EXAMPLES_HAVE_LIBPNG)
#include <png.h>
#else
#include "png_stored.h"
#endif

namespace drawing {

/// A PNG file that cannot be read or written, and why.
class PngError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

#if defined(EXAMPLES_HAVE_LIBPNG)

namespace detail {

/// libpng's state for one file, given back whatever happens.
struct PngState : png_image {
  PngState() : png_image{} { version = PNG_IMAGE_VERSION; }
  ~PngState() { png_image_free(this); }
  PngState(const PngState&) = delete;
  PngState& operator=(const PngState&) = delete;
};

}  // namespace detail

/// Reads any PNG file as 8-bit grey (1 channel) or RGB (3 channels): palettes, 16 bits a sample and
/// interlaced files are converted, transparent parts are laid over white.
/// Throws PngError for a missing, foreign or broken file, and for one of over 100 million pixels.
inline Image read_png(const std::filesystem::path& path) {
  const auto fail = [&](const std::string& why) {
    throw PngError("cannot read '" + path.string() + "': " + why);
  };
  std::error_code no_matter;  // what cannot be asked about cannot be opened either
  if (std::filesystem::is_directory(path, no_matter)) fail("it is a directory");
  detail::PngState state;
  if (!png_image_begin_read_from_file(&state, path.c_str())) fail(state.message);
  if (static_cast<std::uint64_t>(state.width) * state.height > 100'000'000) {
    fail("it has " + std::to_string(state.width) + " x " + std::to_string(state.height) +
         " pixels, more than 100 million");
  }
  // Samples of 16 bits without a note on their gamma are meant as those of 8 bits.
  state.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
  const bool colour = (state.format & PNG_FORMAT_FLAG_COLOR) != 0;
  state.format = colour ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY;
  Image image(static_cast<int>(state.width), static_cast<int>(state.height), colour ? 3 : 1);
  const png_color white{255, 255, 255};
  if (!png_image_finish_read(&state, &white, image.pixels.data(), 0, nullptr)) fail(state.message);
  return image;
}

/// Writes `image` as an 8-bit grey or RGB file, over a file that is there. Throws PngError.
inline void write_png(const std::filesystem::path& path, const Image& image) {
  detail::PngState state;
  state.width = static_cast<png_uint_32>(image.width);
  state.height = static_cast<png_uint_32>(image.height);
  state.format = image.channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY;
  if (!png_image_write_to_file(&state, path.c_str(), 0, image.pixels.data(), 0, nullptr)) {
    throw PngError("cannot write '" + path.string() + "': " + state.message);
  }
}

#else

inline Image read_png(const std::filesystem::path& path) {
  throw PngError("cannot read '" + path.string() +
                 "': this program was built without libpng. Install it (Debian, Ubuntu: apt "
                 "install libpng-dev), then configure and build again");
}

inline void write_png(const std::filesystem::path& path, const Image& image) {
  if (!write_png_stored(path, image)) throw PngError("cannot write '" + path.string() + "'");
}

#endif

}  // namespace drawing
