// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <charconv>
#include <cmath>
#include <string>
#include <vector>

namespace drawing {

/// The marks of one axis, in the axis's own unit, in rising order. A labelled mark is a major one.
struct Tick {
  double value;
  std::string label;
  bool is_major() const { return !label.empty(); }
};

namespace detail {

inline std::string tick_label(double value) {
  char text[32];
  const auto written =
      std::to_chars(text, text + sizeof text, value, std::chars_format::general, 6);
  return {text, written.ptr};
}

}  // namespace detail

/// Round steps (1, 2 or 5 times a power of ten) between `low` and `high`, about `count` of them.
inline std::vector<Tick> linear_ticks(double low, double high, int count) {
  const double rough = (high - low) / count;
  const double power = std::pow(10., std::floor(std::log10(rough)));
  const double step = power * (rough / power < 1.5 ? 1. : rough / power < 3.5 ? 2. : 5.);
  std::vector<Tick> ticks;
  for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i) {
    const double value = i * step + 0.;  // no -0
    ticks.push_back({value, detail::tick_label(value)});
  }
  return ticks;
}

/// 1, 2, …, 9 times each power of ten between `low` and `high` (both positive). All powers have a
/// label, and where the range is small, 2 and 5 or all multiples too.
inline std::vector<Tick> log_ticks(double low, double high) {
  const double decades = std::log10(high / low);
  std::vector<Tick> ticks;
  for (int power = static_cast<int>(std::floor(std::log10(low)));
       std::pow(10., power) <= high * (1. + 1e-9); ++power) {
    for (int digit = 1; digit <= 9; ++digit) {
      const double value = digit * std::pow(10., power);
      if (value < low * (1. - 1e-9) || value > high * (1. + 1e-9)) continue;
      const bool labelled =
          digit == 1 || decades < 0.5 || ((digit == 2 || digit == 5) && decades < 3.);
      ticks.push_back({value, labelled ? detail::tick_label(value) : ""});
    }
  }
  return ticks;
}

}  // namespace drawing
