// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/macros/Macros.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Lanes]
// Sixteen bytes of numbers. An operator computes each lane separately. A comparison sets all bits
// of a lane if it is true, and no bits otherwise. GCC and Clang have such vectors on every
// processor. Other compilers get a struct with the same results, which GCC compiles to code that is
// up to four times as slow. TORCHAMP_PLAIN_LANES chooses it, for tests.

#if defined(__GNUC__) && !defined(TORCHAMP_PLAIN_LANES)

using Floats = float __attribute__((vector_size(16)));
using Words = std::uint32_t __attribute__((vector_size(16)));
using Integers = std::int32_t __attribute__((vector_size(16)));
using Shorts = std::int16_t __attribute__((vector_size(16)));

/// All lanes alike.
template <class Vector, class T>
Vector all_lanes(T number) {
  using Lane = std::remove_cvref_t<decltype(Vector{}[0])>;
  return Vector{} + static_cast<Lane>(number);
}

/// The larger of each.
template <class Vector>
Vector maximum(Vector a, Vector b) {
  return a < b ? b : a;
}

inline Floats numbers_of(Integers integers) {
  return __builtin_convertvector(integers, Floats);
}
/// Cut towards 0.
inline Integers integers_of(Floats numbers) {
  return __builtin_convertvector(numbers, Integers);
}

#else

template <class T>
struct Lanes {
  static constexpr std::size_t count = 16 / sizeof(T);

  template <class Function>
  C10_ALWAYS_INLINE static Lanes each(const Function& function) {
    Lanes result;
    for (std::size_t i = 0; i < count; ++i) result.lane[i] = static_cast<T>(function(i));
    return result;
  }

  T operator[](std::size_t i) const { return lane[i]; }
  T& operator[](std::size_t i) { return lane[i]; }

  friend Lanes operator+(Lanes a, Lanes b) {
    return each([&](std::size_t i) { return a.lane[i] + b.lane[i]; });
  }
  friend Lanes operator-(Lanes a, Lanes b) {
    return each([&](std::size_t i) { return a.lane[i] - b.lane[i]; });
  }
  friend Lanes operator*(Lanes a, Lanes b) {
    return each([&](std::size_t i) { return a.lane[i] * b.lane[i]; });
  }
  friend Lanes operator/(Lanes a, Lanes b) {
    return each([&](std::size_t i) { return a.lane[i] / b.lane[i]; });
  }
  friend Lanes operator&(Lanes a, Lanes b) {
    return each([&](std::size_t i) { return a.lane[i] & b.lane[i]; });
  }
  friend Lanes operator|(Lanes a, Lanes b) {
    return each([&](std::size_t i) { return a.lane[i] | b.lane[i]; });
  }
  friend Lanes operator^(Lanes a, Lanes b) {
    return each([&](std::size_t i) { return a.lane[i] ^ b.lane[i]; });
  }
  friend Lanes operator<<(Lanes a, int bits) {
    return each([&](std::size_t i) { return a.lane[i] << bits; });
  }
  friend Lanes operator>>(Lanes a, int bits) {
    return each([&](std::size_t i) { return a.lane[i] >> bits; });
  }
  Lanes operator~() const {
    return each([&](std::size_t i) { return ~lane[i]; });
  }
  friend auto operator<(Lanes a, Lanes b) {
    using Bits = std::conditional_t<sizeof(T) == 2, std::int16_t, std::int32_t>;
    return Lanes<Bits>::each([&](std::size_t i) { return a.lane[i] < b.lane[i] ? -1 : 0; });
  }

  T lane[count];
};

using Floats = Lanes<float>;
using Words = Lanes<std::uint32_t>;
using Integers = Lanes<std::int32_t>;
using Shorts = Lanes<std::int16_t>;

template <class Vector, class T>
Vector all_lanes(T number) {
  return Vector::each([&](std::size_t) { return number; });
}

template <class Vector>
Vector maximum(Vector a, Vector b) {
  return Vector::each([&](std::size_t i) { return a[i] < b[i] ? b[i] : a[i]; });
}

inline Floats numbers_of(Integers integers) {
  return Floats::each([&](std::size_t i) { return integers[i]; });
}
inline Integers integers_of(Floats numbers) {
  return Integers::each([&](std::size_t i) { return numbers[i]; });
}

#endif

inline Words bits_of(Floats numbers) {
  return std::bit_cast<Words>(numbers);
}
inline Floats floats_of(Words bits) {
  return std::bit_cast<Floats>(bits);
}

/// By lane: `then` if `condition` is true, else `otherwise`.
inline Words select(Integers condition, Words then, Words otherwise) {
  const auto mask = std::bit_cast<Words>(condition);
  return (then & mask) | (otherwise & ~mask);
}
inline Floats select(Integers condition, Floats then, Floats otherwise) {
  return floats_of(select(condition, bits_of(then), bits_of(otherwise)));
}

}  // namespace TORCHAMP_NAMESPACE::detail
