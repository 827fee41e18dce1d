// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/jit/frontend/edit_distance.h>

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The examined and shown part of an unknown name.
inline constexpr std::size_t longest_shown = 128;

/// A user's input in an error message, abbreviated if long.
inline std::string shorten(std::string_view text) {
  if (text.size() <= longest_shown) return std::string(text);
  return std::string(text.substr(0, longest_shown)) + "...";
}

/// A piece of a text: anything that can be printed. (LibTorch's macros make a function of half a
/// kilobyte for each list of the types of pieces.)
struct Piece {
  Piece(const char* text)
      : shown(text),
        print([](std::ostream& out, const void* its) { out << static_cast<const char*>(its); }) {}
  template <class T>
  Piece(const T& value)
      : shown(&value),
        print([](std::ostream& out, const void* its) { out << *static_cast<const T*>(its); }) {}

  const void* shown;
  void (*print)(std::ostream&, const void*);
};
using Pieces = std::initializer_list<Piece>;

inline std::string joined(Pieces pieces) {
  std::ostringstream text;
  for (const Piece& piece : pieces) piece.print(text, piece.shown);
  return text.str();
}

/// Throws an error of that text.
[[noreturn]] inline void fail(Pieces pieces) {
  TORCH_CHECK(false, joined(pieces));
}

/// Throws a ValueError with that text.
[[noreturn]] inline void fail_value(Pieces pieces) {
  TORCH_CHECK_VALUE(false, joined(pieces));
}

/// Warns with that text.
inline void warn(Pieces pieces) {
  TORCH_WARN(joined(pieces));
}

/// Warns in a destructor: drops exceptions of the program's warning handler.
inline void warn_in_destructor(Pieces pieces) noexcept {
  try {
    warn(pieces);
  } catch (...) {
  }
}

/// Warns the first time for `is_known`, or always if LibTorch is set to always warn.
inline void warn_once(std::atomic<bool>& is_known, Pieces pieces) {
  if (c10::WarningUtils::get_warnAlways() || !is_known.exchange(true)) warn(pieces);
}

/// Drops the calling thread's warnings that have `text`, and passes on all others, while it lives.
class NoWarning final : public c10::WarningHandler {
 public:
  explicit NoWarning(const char* text) : text_(text) {}
  void process(const c10::Warning& warning) override {
    if (warning.msg().find(text_) == std::string::npos) outer_->process(warning);
  }

 private:
  const char* text_;
  c10::WarningHandler* outer_ = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

/// The number of single-character edits between two names; for long ones, between their beginnings.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  const std::string from(a.substr(0, longest_shown)), to(b.substr(0, longest_shown));
  return torch::jit::ComputeEditDistance(from.c_str(), to.c_str(), /*maxEditDistance=*/0);
}

}  // namespace TORCHAMP_NAMESPACE::detail

// The core throws only by these macros: LibTorch's macros generate half a kilobyte of code at each
// place. The text names the call, the wrong value and the remedy: "Policy::fp32: LibTorch knows no
// op 'sofmax'. Did you mean 'softmax'?". The pieces are evaluated only if it throws.
#define TORCHAMP_CHECK(condition, ...) \
  if (!(condition)) ::torchamp::detail::fail({__VA_ARGS__})
#define TORCHAMP_CHECK_VALUE(condition, ...) \
  if (!(condition)) ::torchamp::detail::fail_value({__VA_ARGS__})
