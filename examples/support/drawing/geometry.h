// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace drawing {

/// A place on a canvas, in pixels from the top left corner. The pixel (0, 0) has its centre at
/// (0.5, 0.5).
struct Point {
  double x, y;
};

/// An open line through its points.
using Polyline = std::vector<Point>;

/// Whole pixels.
struct Rect {
  int x, y, width, height;
  int right() const { return x + width; }
  int bottom() const { return y + height; }
};

/// How far `p` is from the line between `a` and `b`.
inline double distance_to_segment(Point p, Point a, Point b) {
  const double dx = b.x - a.x, dy = b.y - a.y;
  const double squared_length = dx * dx + dy * dy;
  const double along =
      squared_length > 0. ? ((p.x - a.x) * dx + (p.y - a.y) * dy) / squared_length : 0.;
  const double t = std::clamp(along, 0., 1.);
  return std::hypot(p.x - (a.x + t * dx), p.y - (a.y + t * dy));
}

}  // namespace drawing
