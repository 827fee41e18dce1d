// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/drawing/ticks.h"
#include "support/format.h"

/// `text` as it stands in HTML.
inline std::string escaped(const std::string& text) {
  std::string html;
  for (const char c : text) {
    switch (c) {
      case '&':
        html += "&amp;";
        break;
      case '<':
        html += "&lt;";
        break;
      case '>':
        html += "&gt;";
        break;
      case '"':
        html += "&quot;";
        break;
      default:
        html += c;
    }
  }
  return html;
}

/// A chart as inline SVG, whose letters stay readable at a phone's width.
struct Chart {
  struct Point {
    double x, y;
    std::string label{};  ///< beside it; none if empty
    bool stands_out = false;
  };

  std::string title, x_label;
  std::vector<Point> points;
  bool joined = true;  ///< by a line; else each is a dot
  bool log_y = false;  ///< what is not above 0 lies at the bottom then

  std::string svg() const {
    const auto [x_low, x_high] = range(&Point::x, false);
    const auto [y_low, y_high] = range(&Point::y, log_y);
    const auto to_x = [&, low = x_low, high = x_high](double x) {
      return left + (x - low) / (high - low) * (width - left - right);
    };
    const auto to_y = [&, low = y_low, high = y_high](double y) {
      const double share = log_y ? std::log(std::max(y, low) / low) / std::log(high / low)
                                 : (y - low) / (high - low);
      return height - bottom - share * (height - top - bottom);
    };
    using support::format;
    std::string out =
        format("<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"", width, height) +
        escaped(title) + "\">\n";
    const auto text = [&](double x, double y, const char* anchor, const std::string& words) {
      out += format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor) +
             escaped(words) + "</text>\n";
    };
    for (const auto& tick :
         log_y ? drawing::log_ticks(y_low, y_high) : drawing::linear_ticks(y_low, y_high, 4)) {
      if (!tick.is_major()) continue;
      out += format("<line class=\"grid\" x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>\n", left,
                    width - right, to_y(tick.value), to_y(tick.value));
      text(left - 5., to_y(tick.value) + 4., "end", format("%.3g", tick.value));
    }
    for (const auto& tick : drawing::linear_ticks(x_low, x_high, 4)) {
      text(to_x(tick.value), height - bottom + 15., "middle", tick.label);
    }
    text((left + width - right) / 2., height - 5., "middle", x_label);
    if (joined) {
      out += "<polyline points=\"";
      for (const Point& point : points) {
        if (can_show(point.y)) out += format("%.1f,%.1f ", to_x(point.x), to_y(point.y));
      }
      out += "\"/>\n";
    }
    for (const Point& point : points) {
      const double x = to_x(point.x), y = can_show(point.y) ? to_y(point.y) : top;
      if (!joined || point.stands_out) {
        out += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"%s/>\n", x, y,
                      point.stands_out ? " class=\"bad\"" : "");
      }
      const bool at_right = x > width * 0.6;
      if (!point.label.empty()) {
        text(x + (at_right ? -6. : 6.), y + 4., at_right ? "end" : "start", point.label);
      }
    }
    return out + "</svg>\n";
  }

 private:
  static constexpr double width = 360., height = 230., left = 52., right = 12., top = 14.,
                          bottom = 36.;

  bool can_show(double value) const { return std::isfinite(value); }

  /// Of the finite values, a little wider.
  std::pair<double, double> range(double Point::*of, bool log) const {
    double low = std::numeric_limits<double>::infinity(), high = -low;
    for (const Point& point : points) {
      const double value = point.*of;
      if (!std::isfinite(value) || (log && value <= 0.)) continue;
      low = std::min(low, value), high = std::max(high, value);
    }
    if (low > high) return log ? std::pair{0.1, 1.} : std::pair{0., 1.};
    if (log) return {low / 2., high * 2.};
    const double margin = high > low ? (high - low) * 0.04 : std::max(std::abs(high), 1.) * 0.5;
    return {of == &Point::y && low >= 0. && low < margin ? 0. : low - margin, high + margin};
  }
};
