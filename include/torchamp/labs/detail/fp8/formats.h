// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "torchamp/labs/detail/fp8/lanes.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Codes of small formats]
// These functions process four numbers at once. They have no branches, and use integers where sums
// would round: a program's -ffast-math changes nothing.

inline Floats magnitudes(Floats numbers) {
  return floats_of(bits_of(numbers) & all_lanes<Words>(0x7FFFFFFFU));
}

/// The number of steps from 0, to nearest, ties to even. `last_bit` is 2^23 steps, next to which a
/// number has no bits below a step.
inline Words steps_from_0(Floats numbers, Floats last_bit) {
  return bits_of(numbers + last_bit) - bits_of(last_bit);
}

/// The nearest e4m3 codes, ties to even, for numbers up to 448. For others: any up to 255.
inline Words e4m3_codes(Floats numbers) {
  const Floats values = magnitudes(numbers);
  const Words subnormal = steps_from_0(values, all_lanes<Floats>(0x1p14F));
  const Words bits = bits_of(values);
  const Words odd = (bits >> 20) & all_lanes<Words>(1);
  const Words normal = (bits + all_lanes<Words>(0x7FFFFU - (120U << 23)) + odd) >> 20;
  const Words code =
      select(values < all_lanes<Floats>(0x1p-6F), subnormal, normal) & all_lanes<Words>(0x7F);
  return code | ((bits_of(numbers) >> 24) & all_lanes<Words>(0x80));
}

/// The numbers of e4m3 codes; arbitrary for NaN's codes.
inline Floats e4m3_numbers(Words codes) {
  const Words magnitude = codes & all_lanes<Words>(0x7F);
  const auto integers = std::bit_cast<Integers>(magnitude);
  const Floats subnormal = numbers_of(integers) * all_lanes<Floats>(0x1p-9F);
  const Words normal = (magnitude << 20) + all_lanes<Words>(120U << 23);
  const Words bits = select(integers < all_lanes<Integers>(8), bits_of(subnormal), normal);
  return floats_of(bits | ((codes & all_lanes<Words>(0x80)) << 24));
}

/// How e2m1_codes() rounds.
enum class E2m1Rounding : std::uint8_t {
  to_nearest,  ///< of two to that with the even code
  at_random,   ///< to either neighbour, nearer ones more often, so that the mean is right
};

/// The e4m3 codes of the e2m1 numbers next to `numbers`, at most 6. e2m1 has multiples of 0.5 up to
/// 2, of 1 up to 4, and 6. `random`: 24 bits.
template <E2m1Rounding rounding>
Words e2m1_codes(Floats numbers, Words random) {
  const Floats all = magnitudes(numbers), six = all_lanes<Floats>(6.F);
  const Floats values = select(all < six, all, six);
  const Integers below_2 = values < all_lanes<Floats>(2.F),
                 below_4 = values < all_lanes<Floats>(4.F);
  // The index among 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  const Words skipped = select(below_2, all_lanes<Words>(0),
                               select(below_4, all_lanes<Words>(2), all_lanes<Words>(4)));
  Words index = skipped;
  if constexpr (rounding == E2m1Rounding::to_nearest) {
    index = index + steps_from_0(values, floats_of((skipped << 22) + all_lanes<Words>(149U << 23)));
  } else {
    // Half steps of 0.5, 1 and 2: 24 bits of the fraction.
    const Floats steps = values * floats_of(all_lanes<Words>(128U << 23) - (skipped << 22));
    const auto fraction = std::bit_cast<Words>(integers_of(steps * all_lanes<Floats>(0x1p24F)));
    index = index + ((fraction + random) >> 24);
  }
  const Words code = (index << 2) + all_lanes<Words>(0x30);
  const Words first = (all_lanes<Words>(0) - index) & all_lanes<Words>(0x30);  // of 0 and 0.5
  const auto is_first = std::bit_cast<Integers>(index) < all_lanes<Integers>(2);
  return select(is_first, first, code) | ((bits_of(numbers) >> 24) & all_lanes<Words>(0x80));
}

/// Four independent streams of random numbers: xoshiro128++ of Blackman and Vigna, seeded by their
/// splitmix64.
class RandomStreams {
 public:
  explicit RandomStreams(std::uint64_t seed) {
    std::uint32_t words[4][4];
    for (int stream = 0; stream < 4; ++stream) {
      for (int word = 0; word < 4; word += 2) {
        std::uint64_t mixed = seed += 0x9E3779B97F4A7C15U;
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
        mixed ^= mixed >> 31;
        words[word][stream] = static_cast<std::uint32_t>(mixed);
        words[word + 1][stream] = static_cast<std::uint32_t>(mixed >> 32);
      }
    }
    static_assert(sizeof(words) == sizeof(state_));
    std::memcpy(state_, words, sizeof(words));
  }

  /// The next 24 bits of each.
  Words next() {
    Words &a = state_[0], &b = state_[1], &c = state_[2], &d = state_[3];
    const Words sum = a + d;
    const Words result = ((sum << 7) | (sum >> 25)) + a;
    const Words shifted = b << 9;
    c = c ^ a;
    d = d ^ b;
    b = b ^ c;
    a = a ^ d;
    c = c ^ shifted;
    d = (d << 11) | (d >> 21);
    return result >> 8;
  }

 private:
  Words state_[4];
};

/// The largest number of an 8-bit format: e4m3 has 3 mantissa bits, e5m2 has 2. Both are 1.75 times
/// a power of two.
inline double largest_of(at::ScalarType format) {
  return format == at::kFloat8_e4m3fn ? 448. : 57344.;
}

/// The values of dense 8-bit codes on a CPU, in a dtype that represents all of them. LibTorch's own
/// conversion of e4m3 takes ten times as long.
template <class Format, class Value>
at::Tensor decode_as(const at::Tensor& codes) {
  static const auto table = [] {
    std::array<Value, 256> of_codes;
    for (unsigned code = 0; code < 256; ++code) {
      const Format number(static_cast<std::uint8_t>(code), Format::from_bits());
      of_codes[code] = static_cast<Value>(static_cast<float>(number));
    }
    return of_codes;
  }();
  at::Tensor values =
      at::empty_like(codes, codes.options().dtype(c10::CppTypeToScalarType<Value>()));
  TORCH_INTERNAL_ASSERT(values.strides() == codes.strides(), "fp8 codes with gaps");
  const auto* const from = static_cast<const std::uint8_t*>(codes.const_data_ptr());
  auto* const to = static_cast<Value*>(values.mutable_data_ptr());
  at::parallel_for(0, codes.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = table[from[i]];
  });
  return values;
}

/// As decode_as(), in bf16 or fp32.
inline at::Tensor decode(const at::Tensor& codes, at::ScalarType dtype) {
  const bool e4m3 = codes.scalar_type() == at::kFloat8_e4m3fn;
  if (dtype == at::kBFloat16) {
    return e4m3 ? decode_as<c10::Float8_e4m3fn, c10::BFloat16>(codes)
                : decode_as<c10::Float8_e5m2, c10::BFloat16>(codes);
  }
  return e4m3 ? decode_as<c10::Float8_e4m3fn, float>(codes)
              : decode_as<c10::Float8_e5m2, float>(codes);
}

}  // namespace TORCHAMP_NAMESPACE::detail
