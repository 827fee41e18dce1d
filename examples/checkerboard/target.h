// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/nn/functional/upsampling.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "support/arguments.h"
#include "support/drawing/image.h"
#include "support/drawing/png_file.h"

/// The coordinates of each pixel, from 0 to just below 1: [1, 2, height, width], x before y.
inline torch::Tensor grid(std::int64_t width, std::int64_t height) {
  const auto across = torch::arange(width).unsqueeze(0).repeat({height, 1}).div(width);
  const auto down = torch::arange(height).unsqueeze(1).repeat({1, width}).div(height);
  return torch::stack({across, down}).unsqueeze(0);
}

/// A board of `frequency` fields along each side, 0 and 1: [1, 1, height, width].
inline torch::Tensor checker(std::int64_t width, std::int64_t height, double frequency) {
  const auto stripes = [frequency](std::int64_t count) {
    return torch::arange(count).mul(frequency / static_cast<double>(count) / 2.).fmod(1.).gt(0.5);
  };
  const auto across = stripes(width).reshape({1, width});
  const auto down = stripes(height).reshape({height, 1});
  return across.logical_xor(down).to(torch::kFloat).unsqueeze(0).unsqueeze(0);
}

/// A picture as values from 0 to 1: [1, channels, height, width].
inline torch::Tensor to_tensor(const drawing::Image& image) {
  return torch::tensor(at::ArrayRef<std::uint8_t>(image.pixels))
      .view({1, image.height, image.width, image.channels})
      .permute({0, 3, 1, 2})
      .to(torch::kFloat)
      .div(255.)
      .contiguous();
}

/// The reverse of to_tensor(); values outside of 0 to 1 are cut off.
inline drawing::Image to_image(const torch::Tensor& values) {
  const auto bytes = values.detach()
                         .to(torch::kCPU, torch::kFloat)
                         .squeeze(0)
                         .permute({1, 2, 0})
                         .clamp(0., 1.)
                         .mul(255.)
                         .round()
                         .to(torch::kByte)
                         .contiguous();
  drawing::Image image(static_cast<int>(bytes.size(1)), static_cast<int>(bytes.size(0)),
                       static_cast<int>(bytes.size(2)));
  std::copy_n(bytes.const_data_ptr<std::uint8_t>(), bytes.numel(), image.pixels.begin());
  return image;
}

/// What the network shall paint, at a size that may be chosen later.
class Target {
 public:
  /// The picture in the file, or the board if there is no name. Throws support::UsageError.
  explicit Target(const std::string& file) {
    if (file.empty()) return;
    try {
      picture_ = to_tensor(drawing::read_png(file));
    } catch (const drawing::PngError& error) {
      throw support::UsageError(std::string("--image: ") + error.what());
    }
    if (picture_.size(2) * picture_.size(3) < 16) {
      throw support::UsageError("--image: '" + file + "' has fewer than 16 pixels");
    }
  }

  bool is_board() const { return !picture_.defined(); }
  std::string name() const { return is_board() ? "Checkerboard" : "Picture"; }

  /// With `size` pixels along the longer side, but never more than the picture has.
  torch::Tensor at_size(std::int64_t size) const {
    if (is_board()) return checker(size, size, 8.);
    const std::int64_t longer = std::max(picture_.size(2), picture_.size(3));
    if (size >= longer) return picture_;
    const auto scaled = [&](std::int64_t side) {
      return std::max<std::int64_t>(
          1, std::llround(static_cast<double>(side * size) / static_cast<double>(longer)));
    };
    namespace F = torch::nn::functional;
    return F::interpolate(picture_,
                          F::InterpolateFuncOptions()
                              .size(std::vector{scaled(picture_.size(2)), scaled(picture_.size(3))})
                              .mode(torch::kArea));
  }

 private:
  torch::Tensor picture_;
};
