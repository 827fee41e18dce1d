// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "canvas.h"
#include "font.h"

namespace drawing {

enum class Align { left, centre, right };

/// How a text is written. `height` is that of a capital in pixels; multiples of 7 are the sharpest.
struct TextStyle {
  double height = 14.;
  Color color = palette::ink;
  bool bold = false;
  Align align = Align::left;
};

namespace detail {

inline double pen_width(const TextStyle& style) {
  return style.height * (style.bold ? 0.16 : 0.115);
}

/// The lines of a text in pixels, x along the base line and y up from it, and the text's width.
inline std::pair<std::vector<Polyline>, double> lay_out(std::string_view text,
                                                        const TextStyle& style) {
  constexpr double gap = 4.;  // between letters, in the font's units
  const double unit = style.height / 14.;
  double x = pen_width(style) / 2.;
  std::vector<Polyline> lines;
  for (const char code : text) {
    const Glyph& glyph = find_glyph(code);
    for (Polyline& line : trace(glyph)) {
      for (Point& p : line) p = {x + p.x * unit, p.y * unit};
      lines.push_back(std::move(line));
    }
    x += (glyph.width + gap) * unit;
  }
  const double width = text.empty() ? 0. : x - gap * unit + pen_width(style) / 2.;
  if (style.align != Align::left) {
    const double shift = style.align == Align::centre ? width / 2. : width;
    for (Polyline& line : lines) {
      for (Point& p : line) p.x -= shift;
    }
  }
  return {std::move(lines), width};
}

}  // namespace detail

/// The width of `text` in pixels, as draw_text() writes it.
inline double text_width(std::string_view text, const TextStyle& style = {}) {
  return detail::lay_out(text, style).second;
}

/// Writes `text` (ASCII) with its base line at `y`; `x` is its left end, middle or right end.
inline void draw_text(Canvas& canvas, double x, double y, std::string_view text,
                      const TextStyle& style = {}) {
  const double base = std::floor(y) + 0.5;  // along the middle of a row of pixels
  auto [lines, width] = detail::lay_out(text, style);
  for (Polyline& line : lines) {
    for (Point& p : line) p = {x + p.x, base - p.y};
  }
  canvas.stroke(lines, detail::pen_width(style), style.color);
}

/// Writes a text around `x`, but within the `room` of a picture: a number below the end of an axis
/// is moved inwards.
inline void draw_text_within(Canvas& canvas, Rect room, double x, double y, std::string_view text,
                             TextStyle style = {}) {
  const double half = text_width(text, style) / 2.;
  style.align = Align::centre;
  const double inside = std::min(x, room.right() - half - 2.);
  draw_text(canvas, std::max(inside, room.x + half + 2.), y, text, style);
}

/// A text turned by a quarter, to be read from below to above, with its base line at `x`.
inline void draw_text_upwards(Canvas& canvas, double x, double y, std::string_view text,
                              const TextStyle& style = {}) {
  const double base = std::floor(x) + 0.5;
  auto [lines, width] = detail::lay_out(text, style);
  for (Polyline& line : lines) {
    for (Point& p : line) p = {base - p.y, y - p.x};
  }
  canvas.stroke(lines, detail::pen_width(style), style.color);
}

}  // namespace drawing
