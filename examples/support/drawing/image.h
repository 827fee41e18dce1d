// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace drawing {

/// 8-bit pixels, row by row from the top, channels interleaved: 1 is grey, 3 is RGB.
struct Image {
  int width = 0;
  int height = 0;
  int channels = 0;
  std::vector<std::uint8_t> pixels;

  Image() = default;
  Image(int w, int h, int c) : width(w), height(h), channels(c) {
    pixels.resize(static_cast<std::size_t>(w) * static_cast<std::size_t>(h) *
                  static_cast<std::size_t>(c));
  }

  std::uint8_t& at(int x, int y, int channel) { return pixels[index(x, y, channel)]; }
  std::uint8_t at(int x, int y, int channel) const { return pixels[index(x, y, channel)]; }

 private:
  std::size_t index(int x, int y, int channel) const {
    return (static_cast<std::size_t>(y) * static_cast<std::size_t>(width) +
            static_cast<std::size_t>(x)) *
               static_cast<std::size_t>(channels) +
           static_cast<std::size_t>(channel);
  }
};

}  // namespace drawing
