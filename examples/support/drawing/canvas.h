// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "color.h"
#include "geometry.h"
#include "image.h"

namespace drawing {

/// An RGB picture to draw on. Whatever lies outside of it is cut off.
class Canvas {
 public:
  Canvas(int width, int height, Color background) : image_(width, height, 3) {
    fill({0, 0, width, height}, background);
  }

  int width() const { return image_.width; }
  int height() const { return image_.height; }
  const Image& image() const { return image_; }

  void fill(Rect rect, Color color) {
    for (int y = std::max(rect.y, 0); y < std::min(rect.bottom(), height()); ++y) {
      for (int x = std::max(rect.x, 0); x < std::min(rect.right(), width()); ++x) {
        blend(x, y, color, 1.);
      }
    }
  }

  /// A frame of one pixel, just inside of `rect`.
  void frame(Rect rect, Color color) {
    fill({rect.x, rect.y, rect.width, 1}, color);
    fill({rect.x, rect.bottom() - 1, rect.width, 1}, color);
    fill({rect.x, rect.y, 1, rect.height}, color);
    fill({rect.right() - 1, rect.y, 1, rect.height}, color);
  }

  /// Lines with round ends and joins, antialiased. Where they cross each other they do not add up,
  /// so a half transparent letter has one shade.
  void stroke(const std::vector<Polyline>& lines, double line_width, Color color,
              double opacity = 1.) {
    const double reach = line_width / 2. + 0.5;
    Rect bounds = bounds_of(lines, reach);
    if (bounds.width <= 0 || bounds.height <= 0) return;
    std::vector<float> coverage(static_cast<std::size_t>(bounds.width) *
                                static_cast<std::size_t>(bounds.height));
    for (const Polyline& line : lines) {
      for (std::size_t i = 0; i + 1 < line.size(); ++i) {
        cover(coverage, bounds, line[i], line[i + 1], reach);
      }
    }
    for (int y = 0; y < bounds.height; ++y) {
      for (int x = 0; x < bounds.width; ++x) {
        const float c = coverage[static_cast<std::size_t>(y * bounds.width + x)];
        if (c > 0.F) blend(bounds.x + x, bounds.y + y, color, opacity * static_cast<double>(c));
      }
    }
  }

  /// Copies `image` into `rect`, each source pixel as a block with sharp edges.
  void draw(const Image& image, Rect rect) {
    for (int y = std::max(rect.y, 0); y < std::min(rect.bottom(), height()); ++y) {
      const int from_y = (y - rect.y) * image.height / rect.height;
      for (int x = std::max(rect.x, 0); x < std::min(rect.right(), width()); ++x) {
        const int from_x = (x - rect.x) * image.width / rect.width;
        for (int c = 0; c < 3; ++c) {
          image_.at(x, y, c) = image.at(from_x, from_y, image.channels == 3 ? c : 0);
        }
      }
    }
  }

 private:
  void blend(int x, int y, Color color, double opacity) {
    const std::uint8_t over[] = {color.r, color.g, color.b};
    for (int c = 0; c < 3; ++c) {
      const double mixed = image_.at(x, y, c) + (over[c] - image_.at(x, y, c)) * opacity;
      image_.at(x, y, c) = static_cast<std::uint8_t>(std::lround(mixed));
    }
  }

  /// The pixels that lines of this reach touch, cut to the canvas.
  Rect bounds_of(const std::vector<Polyline>& lines, double reach) const {
    double left = width(), top = height(), right = 0., bottom = 0.;
    for (const Polyline& line : lines) {
      for (const Point& p : line) {
        left = std::min(left, p.x - reach), right = std::max(right, p.x + reach);
        top = std::min(top, p.y - reach), bottom = std::max(bottom, p.y + reach);
      }
    }
    const int x = std::max(0, static_cast<int>(std::floor(left)));
    const int y = std::max(0, static_cast<int>(std::floor(top)));
    return {x, y, std::min(width(), static_cast<int>(std::ceil(right))) - x,
            std::min(height(), static_cast<int>(std::ceil(bottom))) - y};
  }

  /// Raises the coverage of the pixels near one segment: 1 inside, falling to 0 over one pixel.
  static void cover(std::vector<float>& coverage, Rect bounds, Point a, Point b, double reach) {
    const auto pixel = [](double value, int first, int count) {
      return std::clamp(static_cast<int>(std::floor(value)) - first, 0, count);
    };
    const int x0 = pixel(std::min(a.x, b.x) - reach, bounds.x, bounds.width);
    const int x1 = pixel(std::max(a.x, b.x) + reach + 1., bounds.x, bounds.width);
    const int y0 = pixel(std::min(a.y, b.y) - reach, bounds.y, bounds.height);
    const int y1 = pixel(std::max(a.y, b.y) + reach + 1., bounds.y, bounds.height);
    for (int y = y0; y < y1; ++y) {
      for (int x = x0; x < x1; ++x) {
        const Point centre{bounds.x + x + 0.5, bounds.y + y + 0.5};
        const double inside = std::clamp(reach - distance_to_segment(centre, a, b), 0., 1.);
        float& value = coverage[static_cast<std::size_t>(y * bounds.width + x)];
        value = std::max(value, static_cast<float>(inside));
      }
    }
  }

  Image image_;
};

}  // namespace drawing
