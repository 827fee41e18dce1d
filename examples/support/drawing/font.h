// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <numbers>
#include <string>
#include <string_view>
#include <vector>

#include "../format.h"
#include "geometry.h"

namespace drawing {

/// A letter as lines of a pen. The path's unit is 1/14 of a capital's height, y goes up from the
/// base line; small letters are 10 high and reach down to -4.
///
///     M x y        lift the pen and put it down at (x, y)
///     L x y        a straight line
///     H x y        a quarter of an ellipse that leaves sideways and arrives upright
///     V x y        a quarter of an ellipse that leaves upright and arrives sideways
///     Q u v x y    a parabola that bends towards (u, v)
struct Glyph {
  char code;
  double width;
  std::string_view path;
};

// clang-format off
inline constexpr Glyph font[] = {
    {' ', 3, ""},
    {'!', 0, "M0 14 L0 4.5 M0 0 L0 0.2"},
    {'"', 3, "M0 14 L0 10.5 M3 14 L3 10.5"},
    {'#', 10, "M2 0 L4 14 M6 0 L8 14 M0.5 4.5 L9 4.5 M1 9.5 L9.5 9.5"},
    {'$', 9, "M8.6 11.5 Q7.5 13 4.5 13 H0.3 10 Q0.3 7.8 4.5 7 Q9 6.2 9 3.8 V4.5 1 Q1.2 1 0 3 M4.5 15.5 L4.5 -1.5"},
    {'%', 12, "M0 11 V2.5 14 H5 11 V2.5 8 H0 11 M7 3 V9.5 6 H12 3 V9.5 0 H7 3 M10.5 14 L1.5 0"},
    {'&', 10, "M10 0 L2.6 9 Q1.6 10.3 1.6 11.2 V4.3 14 H7 11.2 Q7 9.4 4.2 7.9 Q0 5.8 0 3.6 V4 0 Q8.4 0 9.4 6.6"},
    {'\'', 0, "M0 14 L0 10.5"},
    {'(', 3, "M3 15.5 Q0 11.5 0 6.25 Q0 1 3 -3"},
    {')', 3, "M0 15.5 Q3 11.5 3 6.25 Q3 1 0 -3"},
    {'*', 6, "M3 14 L3 7.5 M0.2 12.4 L5.8 9.1 M5.8 12.4 L0.2 9.1"},
    {'+', 8, "M0 6 L8 6 M4 10 L4 2"},
    {',', 1, "M1 0.4 L0 -2.8"},
    {'-', 5, "M0 6 L5 6"},
    {'.', 0, "M0 0 L0 0.2"},
    {'/', 6, "M0 -2 L6 15.5"},
    {'0', 8, "M0 9.5 V4 14 H8 9.5 L8 4.5 V4 0 H0 4.5 L0 9.5"},
    {'1', 8, "M1.2 10.8 L4.7 14 L4.7 0"},
    {'2', 8, "M0.2 10.4 V4 14 H7.8 10.4 Q7.8 8 4.8 5.2 L0 0 L8 0"},
    {'3', 8, "M0.3 11.8 Q1.2 14 4 14 H7.6 10.8 V4 7.6 L2.8 7.6 M4 7.6 H8 3.8 V4 0 Q0.8 0 0 2.4"},
    {'4', 8, "M6 0 L6 14 L0 4.2 L8.4 4.2"},
    {'5', 8, "M7.2 14 L1.2 14 L0.5 7.6 Q2 9 4 9 H8 4.5 V4 0 Q0.9 0 0 2.3"},
    {'6', 8, "M7.2 12.6 Q6.2 14 4.3 14 H0 7.5 L0 4.6 V4 0 H8 4.5 V4 9 H0 4.6"},
    {'7', 8, "M0 14 L8 14 L3 0"},
    {'8', 8, "M4 7.6 H0.5 10.8 V4 14 H7.5 10.8 V4 7.6 H0 3.8 V4 0 H8 3.8 V4 7.6"},
    {'9', 8, "M0.8 1.4 Q1.8 0 3.7 0 H8 6.5 L8 9.4 V4 14 H0 9.5 V4 5 H8 9.4"},
    {':', 0, "M0 0 L0 0.2 M0 8.8 L0 9"},
    {';', 1, "M1 0.4 L0 -2.8 M1 8.8 L1 9"},
    {'<', 8, "M8 10.5 L0 6 L8 1.5"},
    {'=', 8, "M0 8 L8 8 M0 4 L8 4"},
    {'>', 8, "M0 10.5 L8 6 L0 1.5"},
    {'?', 7, "M0 10.8 V3.5 14 H7 10.8 Q7 8.6 4.6 7.2 Q3.4 6.4 3.4 4.4 M3.4 0 L3.4 0.2"},
    {'@', 13, "M9.5 3.5 L9.5 9.5 M9.5 6.5 V6.6 9.5 H3.6 6.5 V6.6 3.5 H9.5 6.5 M9.5 5 Q9.5 3.5 11 3.5 Q13 3.5 13 7 V6.5 14 H0 6 V6.5 -2 Q9 -2 10.8 -1"},
    {'A', 10, "M0 0 L5 14 L10 0 M1.7 4.6 L8.3 4.6"},
    {'B', 9, "M0 7.5 L5 7.5 H8.3 10.7 V5 14 L0 14 L0 0 L5 0 H9 3.8 V5 7.5"},
    {'C', 10, "M10 11 Q8.6 14 5.2 14 H0 8 L0 6 V5.2 0 Q8.6 0 10 3"},
    {'D', 10, "M0 0 L0 14 L4 14 H10 8 L10 6 V4 0 L0 0"},
    {'E', 8, "M8 14 L0 14 L0 0 L8 0 M0 7.3 L7 7.3"},
    {'F', 8, "M8 14 L0 14 L0 0 M0 7.3 L7 7.3"},
    {'G', 10, "M10 11.2 Q8.6 14 5.2 14 H0 8 L0 6 V5.2 0 H10.2 5 L10.2 6.6 L6 6.6"},
    {'H', 9.5, "M0 0 L0 14 M9.5 0 L9.5 14 M0 7.3 L9.5 7.3"},
    {'I', 0, "M0 0 L0 14"},
    {'J', 7, "M7 14 L7 4 V3.5 0 H0 4"},
    {'K', 9, "M0 0 L0 14 M9 14 L0 5.2 M3 8.1 L9.2 0"},
    {'L', 7.5, "M0 14 L0 0 L7.5 0"},
    {'M', 11, "M0 0 L0 14 L5.5 4 L11 14 L11 0"},
    {'N', 9.5, "M0 0 L0 14 L9.5 0 L9.5 14"},
    {'O', 11, "M0 8 V5.5 14 H11 8 L11 6 V5.5 0 H0 6 L0 8"},
    {'P', 9, "M0 0 L0 14 L5 14 H9 10.2 V5 6.4 L0 6.4"},
    {'Q', 11, "M0 8 V5.5 14 H11 8 L11 6 V5.5 0 H0 6 L0 8 M7 4 L11 -1"},
    {'R', 9, "M0 0 L0 14 L5 14 H9 10.2 V5 6.4 L0 6.4 M5 6.4 L9.2 0"},
    {'S', 9, "M8.6 11.8 Q7.5 14 4.5 14 H0.4 10.6 Q0.4 8 4.5 7.2 Q9 6.2 9 3.6 V4.5 0 Q1.2 0 0 2.5"},
    {'T', 10, "M0 14 L10 14 M5 14 L5 0"},
    {'U', 9.5, "M0 14 L0 5 V4.75 0 H9.5 5 L9.5 14"},
    {'V', 10, "M0 14 L5 0 L10 14"},
    {'W', 15, "M0 14 L3.75 0 L7.5 13 L11.25 0 L15 14"},
    {'X', 9, "M0 14 L9 0 M9 14 L0 0"},
    {'Y', 10, "M0 14 L5 6.5 L10 14 M5 6.5 L5 0"},
    {'Z', 9, "M0 14 L9 14 L0 0 L9 0"},
    {'[', 3, "M3 15.5 L0 15.5 L0 -3 L3 -3"},
    {'\\', 6, "M0 15.5 L6 -2"},
    {']', 3, "M0 15.5 L3 15.5 L3 -3 L0 -3"},
    {'^', 7, "M0 9.5 L3.5 14 L7 9.5"},
    {'_', 9, "M0 -2.5 L9 -2.5"},
    {'`', 2, "M0 14 L2 11.5"},
    {'a', 7.5, "M7.5 10 L7.5 0 M7.5 5 V3.75 10 H0 5 V3.75 0 H7.5 5"},
    {'b', 7.5, "M0 14 L0 0 M0 5 V3.75 10 H7.5 5 V3.75 0 H0 5"},
    {'c', 7, "M7 7.8 Q6 10 3.75 10 H0 5 V3.75 0 Q6 0 7 2.2"},
    {'d', 7.5, "M7.5 14 L7.5 0 M7.5 5 V3.75 10 H0 5 V3.75 0 H7.5 5"},
    {'e', 7.5, "M0 5.2 L7.5 5.2 V3.75 10 H0 5 V3.75 0 Q6 0 7.2 1.9"},
    {'f', 4.6, "M4.6 14 L4.2 14 H1.8 11.4 L1.8 0 M0 10 L4.2 10"},
    {'g', 7.5, "M7.5 10 L7.5 -0.5 V3.75 -4 Q1.2 -4 0.4 -2.4 M7.5 5 V3.75 10 H0 5 V3.75 0 H7.5 5"},
    {'h', 7, "M0 14 L0 0 M0 6.4 V3.6 10 H7 6.4 L7 0"},
    {'i', 0, "M0 10 L0 0 M0 13.8 L0 14"},
    {'j', 2, "M2 10 L2 -1.4 V-0.4 -4 M2 13.8 L2 14"},
    {'k', 6.6, "M0 14 L0 0 M6.4 10 L0 3.8 M2.4 6.1 L6.8 0"},
    {'l', 1.6, "M0 14 L0 2 Q0 0 1.6 0"},
    {'m', 11.6, "M0 10 L0 0 M0 6.8 V3 10 H5.8 6.8 L5.8 0 M5.8 6.8 V8.8 10 H11.6 6.8 L11.6 0"},
    {'n', 7, "M0 10 L0 0 M0 6.4 V3.6 10 H7 6.4 L7 0"},
    {'o', 8, "M0 5 V4 10 H8 5 V4 0 H0 5"},
    {'p', 7.5, "M0 10 L0 -4 M0 5 V3.75 10 H7.5 5 V3.75 0 H0 5"},
    {'q', 7.5, "M7.5 10 L7.5 -4 M7.5 5 V3.75 10 H0 5 V3.75 0 H7.5 5"},
    {'r', 4.4, "M0 10 L0 0 M0 6 V3.8 10 L4.4 10"},
    {'s', 6.6, "M6.2 8.3 Q5.4 10 3.3 10 H0.4 7.5 Q0.4 5.8 3.3 5.2 Q6.6 4.6 6.6 2.6 V3.3 0 Q0.9 0 0 1.9"},
    {'t', 4.6, "M1.8 13.2 L1.8 2.4 V4.2 0 L4.6 0 M0 10 L4.4 10"},
    {'u', 7, "M0 10 L0 3.6 V3.4 0 H7 3.6 M7 10 L7 0"},
    {'v', 7.6, "M0 10 L3.8 0 L7.6 10"},
    {'w', 12, "M0 10 L3 0 L6 9.4 L9 0 L12 10"},
    {'x', 7, "M0 10 L7 0 M7 10 L0 0"},
    {'y', 7.6, "M0 10 L3.8 0 M7.6 10 L3.2 -1.6 Q2.3 -4 0 -4"},
    {'z', 7, "M0 10 L7 10 L0 0 L7 0"},
    {'{', 4, "M4 15.5 H2 13.5 L2 8.25 V0 6.25 H2 4.25 L2 -1 V4 -3"},
    {'|', 0, "M0 15.5 L0 -3"},
    {'}', 4, "M0 15.5 H2 13.5 L2 8.25 V4 6.25 H2 4.25 L2 -1 V0 -3"},
    {'~', 9, "M0 5 Q0.6 7.2 2.6 7.2 Q4 7.2 4.7 6.2 Q5.4 5.2 6.6 5.2 Q8.4 5.2 9 7.4"},
};
// clang-format on

/// The glyph of `code`; '?' stands for what the font lacks.
inline const Glyph& find_glyph(char code) {
  const Glyph* unknown = nullptr;
  for (const Glyph& glyph : font) {
    if (glyph.code == code) return glyph;
    if (glyph.code == '?') unknown = &glyph;
  }
  return *unknown;
}

/// The pen's lines of a glyph, in the units of its path, curves broken into short pieces.
inline std::vector<Polyline> trace(const Glyph& glyph) {
  constexpr int pieces = 10;
  std::vector<Polyline> lines;
  const char* at = glyph.path.data();
  const char* const end = at + glyph.path.size();
  const auto number = [&] {
    while (at != end && *at == ' ') ++at;
    const char* const begin = at;
    while (at != end && std::string_view("-.0123456789").find(*at) != std::string_view::npos) ++at;
    return support::number_of(std::string(begin, at));
  };
  const auto point = [&] {
    const double x = number();
    return Point{x, number()};
  };
  while (at != end) {
    const char command = *at++;
    if (command == ' ') continue;
    if (command == 'M') {
      lines.push_back({point()});
      continue;
    }
    Polyline& line = lines.back();
    const Point from = line.back();
    const Point bend = command == 'Q' ? point() : Point{};
    const Point to = point();
    for (int i = 1; i < pieces && command != 'L'; ++i) {
      const double t = static_cast<double>(i) / pieces;
      const double sine = std::sin(t * std::numbers::pi / 2.);
      const double rest = 1. - std::cos(t * std::numbers::pi / 2.);
      const auto mix = [](double a, double b, double weight) { return a + (b - a) * weight; };
      if (command == 'H') {
        line.push_back({mix(from.x, to.x, sine), mix(from.y, to.y, rest)});
      } else if (command == 'V') {
        line.push_back({mix(from.x, to.x, rest), mix(from.y, to.y, sine)});
      } else {
        line.push_back({mix(mix(from.x, bend.x, t), mix(bend.x, to.x, t), t),
                        mix(mix(from.y, bend.y, t), mix(bend.y, to.y, t), t)});
      }
    }
    line.push_back(to);
  }
  return lines;
}

}  // namespace drawing
