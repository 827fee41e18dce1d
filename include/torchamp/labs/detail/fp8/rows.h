// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>
#include <vector>

#include "torchamp/labs/detail/fp8/formats.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Kernels of the rehearsal]
// One pass over a matrix finds the magnitudes of a tile's blocks, another writes their codes. Both
// process rows as they are in memory, 16 elements at a time, whatever the direction of the blocks
// (along rows, across, square). Sixteen are four vectors of fp32, and compilers vectorise loops of
// that length at -O2.

/// A matrix in memory, with elements of a row side by side.
template <class T>
struct Rows {
  T* data;
  int64_t rows, columns, stride;

  T* row(int64_t i) const { return data + i * stride; }
};

/// The size of the blocks of one scale, less at the matrix's edges. 0: as large as the matrix.
struct Fp8Block {
  int64_t rows = 0, columns = 0;

  Fp8Block t() const { return {columns, rows}; }
  /// For a matrix of this size, which is not empty.
  Fp8Block within(int64_t all_rows, int64_t all_columns) const {
    return {rows == 0 ? all_rows : rows, columns == 0 ? all_columns : columns};
  }
};

constexpr int64_t blocks_in(int64_t size, int64_t block) {
  return (size + block - 1) / block;
}

/// Sixteen elements of a row.
constexpr int64_t chunk = 16;
using ChunkOfFloats = Floats[chunk / 4];

inline float to_float(float number) {
  return number;
}
inline float to_float(c10::BFloat16 number) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(number.x) << 16);
}

/// Up to 16 elements, with zeros behind.
template <class T>
C10_ALWAYS_INLINE void load_chunk(const T* from, int64_t size, ChunkOfFloats& to) {
  float numbers[chunk];
  if (size >= chunk) {
    for (int64_t k = 0; k < chunk; ++k) numbers[k] = to_float(from[k]);
  } else {
    for (int64_t k = 0; k < chunk; ++k) numbers[k] = k < size ? to_float(from[k]) : 0.F;
  }
  std::memcpy(to, numbers, sizeof to);
}

/// Copies `size` elements, 16 at most; all 16 without a call.
template <class T>
C10_ALWAYS_INLINE void copy_chunk(const T* from, int64_t size, void* to) {
  if (size >= chunk) {
    std::memcpy(to, from, chunk * sizeof(T));
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(T));
  }
}

/// Up to 16 bytes, with zeros behind.
inline void load_words(const std::uint8_t* from, int64_t size, std::uint32_t (&to)[chunk]) {
  std::uint8_t bytes[chunk] = {};
  copy_chunk(from, size, bytes);
  for (int64_t k = 0; k < chunk; ++k) to[k] = bytes[k];
}

/// Four numbers of an array.
inline Floats floats_at(const float* from) {
  Floats numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  return numbers;
}

/// The largest magnitude of each column, compared by bits, which order NaN above inf.
template <class T>
class Magnitudes {
  using Vector = std::conditional_t<sizeof(T) == 2, Shorts, Integers>;
  using Bits = std::conditional_t<sizeof(T) == 2, std::int16_t, std::int32_t>;
  using Chunk = Vector[chunk * sizeof(T) / sizeof(Vector)];

 public:
  explicit Magnitudes(int64_t columns)
      : columns_(columns), largest_(static_cast<std::size_t>(blocks_in(columns, chunk) * chunk)) {}

  void include(const T* row) {
    for (int64_t j = 0; j < columns_; j += chunk) {
      Chunk numbers = {}, here;
      copy_chunk(row + j, columns_ - j, numbers);
      std::memcpy(here, largest_.data() + j, sizeof here);
      for (std::size_t k = 0; k < std::size(here); ++k) {
        const Vector magnitudes = numbers[k] & all_lanes<Vector>(std::numeric_limits<Bits>::max());
        here[k] = maximum(here[k], magnitudes);
      }
      std::memcpy(largest_.data() + j, here, sizeof here);
    }
  }

  float of_columns(int64_t begin, int64_t end) const {
    Bits bits = largest_[static_cast<std::size_t>(begin)];
    if (end - begin > 1) {  // whole chunks, or the last ones
      Vector vectors = {};
      for (int64_t j = begin; j < end; j += static_cast<int64_t>(sizeof(Vector) / sizeof(Bits))) {
        Vector here;
        std::memcpy(&here, largest_.data() + j, sizeof here);
        vectors = maximum(vectors, here);
      }
      for (std::size_t k = 0; k < sizeof vectors / sizeof bits; ++k) {
        bits = std::max(bits, vectors[k]);
      }
    }
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << (32 - 8 * sizeof(T)));
  }

 private:
  int64_t columns_;
  std::vector<Bits> largest_;
};

/// Sets the elements of one block: one, or whole chunks; those past `end` do not count.
inline void fill_columns(std::vector<float>& columns, int64_t begin, int64_t end, float value) {
  if (end - begin == 1) {
    columns[static_cast<std::size_t>(begin)] = value;
    return;
  }
  ChunkOfFloats four;
  for (Floats& values : four) values = all_lanes<Floats>(value);
  for (int64_t j = begin; j < end; j += chunk) {
    std::memcpy(columns.data() + j, four, sizeof four);
  }
}

/// e4m3 numbers with powers of two as scales: see Note [Scales of fp8].
struct E4m3Blocks {
  using Scale = float;  // the inverse, by which a code's number is multiplied

  static float number(Scale inverse) { return inverse; }

  /// For a block of this largest magnitude.
  static Scale scale_of(float magnitude) {
    constexpr std::uint32_t exponent = 0x7F800000U;
    if (std::bit_cast<std::uint32_t>(magnitude) >= exponent) return std::nanf("");
    const float quotient = 448.F / std::max(magnitude, 0x1p-110F);
    return 1.F / std::bit_cast<float>(std::bit_cast<std::uint32_t>(quotient) & exponent);
  }

  /// The factor of the elements.
  static float factor_of(Scale inverse) { return 1.F / inverse; }

  struct Writer {
    Writer(const E4m3Blocks&, int64_t /*place*/) {}
    Words codes(Floats numbers, Floats factors) { return e4m3_codes(numbers * factors); }
  };
};

// Note [The mean of random rounding]
// Stochastic rounding is unbiased, except for numbers beyond 6, the largest of e2m1, which
// saturate. Scales rounded to nearest are too small for the largest elements of every second block:
// a matrix of normal numbers becomes 0.35 % too small on average, of lognormal ones 0.8 %. So for
// stochastic rounding scales are rounded up, by up to an 8th; the squared error grows by a fifth,
// from 0.019 to 0.022 of the squared length. For elements that are rounded to nearest, scales are
// also rounded to nearest: the error is 0.009, with any bias.

/// e2m1 numbers with e4m3 scales, and a power of two per matrix.
template <E2m1Rounding rounding>
struct E2m1Blocks {
  using Scale = std::uint8_t;

  float of_matrix;     // its scale
  std::uint64_t seed;  // of the random numbers

  static float number(Scale code) { return e4m3_numbers(all_lanes<Words>(code))[0]; }

  /// At least the smallest e4m3 number. Rounded up for stochastic rounding: see
  /// Note [The mean of random rounding].
  Scale scale_of(float magnitude) const {
    const float wanted = std::max(magnitude * of_matrix / 6.F, 0x1p-9F);
    const auto nearest = static_cast<Scale>(e4m3_codes(all_lanes<Floats>(wanted))[0]);
    const bool is_below = rounding == E2m1Rounding::at_random && number(nearest) < wanted;
    return is_below ? nearest + 1 : nearest;
  }

  /// The divisor of the elements after multiplication by the tensor's scale.
  static float factor_of(Scale code) { return number(code); }

  struct Writer {
    Writer(const E2m1Blocks& blocks, int64_t place)
        : of_matrix(blocks.of_matrix), random(blocks.seed ^ static_cast<std::uint64_t>(place)) {}
    Words codes(Floats numbers, Floats factors) {
      const Words bits = rounding == E2m1Rounding::at_random ? random.next() : Words{};
      return e2m1_codes<rounding>(numbers * all_lanes<Floats>(of_matrix) / factors, bits);
    }
    float of_matrix;
    RandomStreams random;
  };
};

/// Calls `function(row of blocks, first column, last column + 1)` for the tiles of a matrix, in
/// parallel. A tile is as high as a block, holds whole blocks, and starts at a chunk.
template <class Function>
void for_each_tile(int64_t rows, int64_t columns, Fp8Block block, const Function& function) {
  const int64_t width = block.columns > 512 ? columns : 512;  // blocks are 1, 16, 32 or 128 wide
  const int64_t across = blocks_in(columns, width), tiles = across * blocks_in(rows, block.rows);
  const int64_t grain = std::max<int64_t>(1, 32768 / (block.rows * std::min(width, columns)));
  at::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile % across * width;
      function(tile / across, first, std::min(columns, first + width));
    }
  });
}

/// Writes the codes and scales of `matrix` in dense rows, for blocks of a size that is not 0.
template <class T, class Blocks>
void quantize_rows(const Rows<const T>& matrix, Fp8Block block, const Blocks& blocks,
                   std::uint8_t* codes, typename Blocks::Scale* scales) {
  const int64_t scale_columns = blocks_in(matrix.columns, block.columns);
  for_each_tile(matrix.rows, matrix.columns, block, [&](int64_t band, int64_t first, int64_t last) {
    const int64_t size = last - first, top = band * block.rows;
    const int64_t bottom = std::min(matrix.rows, top + block.rows);
    Magnitudes<T> largest(size);
    for (int64_t i = top; i < bottom; ++i) largest.include(matrix.row(i) + first);
    std::vector<float> factors(static_cast<std::size_t>(blocks_in(size, chunk) * chunk), 1.F);
    for (int64_t j = 0; j < size; j += block.columns) {
      const int64_t behind = std::min(size, j + block.columns);
      const auto scale = blocks.scale_of(largest.of_columns(j, behind));
      scales[band * scale_columns + (first + j) / block.columns] = scale;
      fill_columns(factors, j, behind, blocks.factor_of(scale));
    }
    ChunkOfFloats numbers;
    std::uint8_t written[chunk];
    for (int64_t i = top; i < bottom; ++i) {
      const int64_t place = i * matrix.columns + first;
      const T* const row = matrix.row(i) + first;
      typename Blocks::Writer writer(blocks, place);
      for (int64_t j = 0; j < size; j += chunk) {
        load_chunk(row + j, size - j, numbers);
        std::uint32_t words[chunk];
        for (int64_t k = 0; k < 4; ++k) {
          const Words four = writer.codes(numbers[k], floats_at(factors.data() + j + 4 * k));
          std::memcpy(words + 4 * k, &four, sizeof four);
        }
        for (int64_t k = 0; k < chunk; ++k) written[k] = static_cast<std::uint8_t>(words[k]);
        copy_chunk(written, size - j, codes + place + j);
      }
    }
  });
}

/// Numbers that `T` holds.
inline void convert_chunk(const ChunkOfFloats& from, float (&to)[chunk]) {
  std::memcpy(to, from, sizeof to);
}
inline void convert_chunk(const ChunkOfFloats& from, c10::BFloat16 (&to)[chunk]) {
  std::uint32_t bits[chunk];
  std::uint16_t upper[chunk];
  std::memcpy(bits, from, sizeof bits);
  for (int64_t k = 0; k < chunk; ++k) upper[k] = static_cast<std::uint16_t>(bits[k] >> 16);
  std::memcpy(to, upper, sizeof upper);
}

/// Writes codes times the scales of their blocks, as quantize_rows() left them, in dense rows.
template <class Blocks, class T>
void decode_rows(const std::uint8_t* codes, const typename Blocks::Scale* scales, Fp8Block block,
                 const Rows<T>& matrix) {
  const int64_t scale_columns = blocks_in(matrix.columns, block.columns);
  for_each_tile(matrix.rows, matrix.columns, block, [&](int64_t band, int64_t first, int64_t last) {
    const int64_t size = last - first, top = band * block.rows;
    const int64_t bottom = std::min(matrix.rows, top + block.rows);
    std::vector<float> factors(static_cast<std::size_t>(blocks_in(size, chunk) * chunk));
    for (int64_t j = 0; j < size; j += block.columns) {
      const auto scale = scales[band * scale_columns + (first + j) / block.columns];
      fill_columns(factors, j, std::min(size, j + block.columns), Blocks::number(scale));
    }
    for (int64_t i = top; i < bottom; ++i) {
      const std::uint8_t* const from = codes + i * matrix.columns + first;
      T* const to = matrix.row(i) + first;
      for (int64_t j = 0; j < size; j += chunk) {
        std::uint32_t words[chunk];
        load_words(from + j, size - j, words);
        ChunkOfFloats numbers;
        for (int64_t k = 0; k < 4; ++k) {
          Words four;
          std::memcpy(&four, words + 4 * k, sizeof four);
          numbers[k] = e4m3_numbers(four) * floats_at(factors.data() + j + 4 * k);
        }
        T written[chunk];
        convert_chunk(numbers, written);
        copy_chunk(written, size - j, to + j);
      }
    }
  });
}

// Note [The Hadamard transform]
// A few large elements in a block of 16 leave no codes for the others. So both operands of a
// weight's gradient are multiplied, in groups of 16 along the contraction, by an orthogonal matrix,
// which spreads such elements over the block and cancels in the product: (G H)(H' X) = G X. Its
// entries are 1/4 or -1/4, so it is exact if the sums are. The signs are TransformerEngine's.

/// Writes the transform of the columns of `matrix`, 16 rows at a time, in dense rows; their number
/// is a multiple of 16.
template <class T>
void hadamard_transform_rows(const Rows<const T>& matrix, float* to) {
  const auto transform = [&](int64_t top, int64_t column, int64_t width) {
    constexpr float signs[chunk] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
    ChunkOfFloats rows[chunk];
    for (int64_t i = 0; i < chunk; ++i) {
      const bool is_there = top + i < matrix.rows;
      load_chunk(is_there ? matrix.row(top + i) + column : nullptr, is_there ? width : 0, rows[i]);
      for (Floats& four : rows[i]) four = four * all_lanes<Floats>(0.25F * signs[i]);
    }
    for (int64_t step = 1; step < chunk; step *= 2) {
      for (int64_t i = 0; i < chunk; ++i) {
        if ((i & step) != 0) continue;
        for (int64_t k = 0; k < 4; ++k) {
          const Floats a = rows[i][k], b = rows[i + step][k];
          rows[i][k] = a + b;
          rows[i + step][k] = a - b;
        }
      }
    }
    for (int64_t i = 0; i < chunk; ++i) {
      float written[chunk];
      convert_chunk(rows[i], written);
      copy_chunk(written, width, to + (top + i) * matrix.columns + column);
    }
  };
  for_each_tile(matrix.rows, matrix.columns, {chunk, 1},
                [&](int64_t band, int64_t first, int64_t last) {
                  for (int64_t j = first; j < last; j += chunk)
                    transform(band * chunk, j, last - j);
                });
}

}  // namespace TORCHAMP_NAMESPACE::detail
