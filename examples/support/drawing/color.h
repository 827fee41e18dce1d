// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace drawing {

/// An sRGB colour.
struct Color {
  std::uint8_t r, g, b;
  friend bool operator==(const Color&, const Color&) = default;
};

/// The colours of every picture that the examples draw. The series colours stay apart for readers
/// with any common form of colour blindness, and in print.
namespace palette {
inline constexpr Color paper{255, 255, 255};
inline constexpr Color ink{34, 38, 46};
inline constexpr Color muted{112, 118, 130};
inline constexpr Color rule{206, 210, 218};
inline constexpr Color faint_rule{235, 237, 241};
inline constexpr Color blue{31, 103, 178};
inline constexpr Color orange{224, 108, 20};
inline constexpr Color green{26, 140, 98};
inline constexpr Color purple{132, 74, 168};
}  // namespace palette

}  // namespace drawing
