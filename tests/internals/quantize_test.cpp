// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "support/devices.h"
#include "support/fp8_reference.h"
#include "torchamp/labs/detail/fp8/formats.h"
#include "torchamp/labs/detail/fp8/quantize.h"

namespace {

using torchamp::detail::decode;
using torchamp::detail::Fp8Matrix;
using torchamp::detail::quantize;
using torchamp::detail::quantize_blocks;

struct Format {
  at::ScalarType dtype;
  SmallFormat reference;
};
const Format formats[] = {{at::kFloat8_e4m3fn, e4m3}, {at::kFloat8_e5m2, e5m2}};

at::Tensor all_codes(at::ScalarType dtype) {
  return at::arange(256, at::kInt).to(at::kByte).view(dtype);
}

TEST(Fp8Formats, EachOf256CodesDecodesAsTheFormatIsDefined) {
  for (const auto& [dtype, reference] : formats) {
    for (const at::ScalarType wide : {at::kBFloat16, at::kFloat}) {
      const at::Tensor values = decode(all_codes(dtype), wide).to(at::kDouble);
      for (int code = 0; code < 256; ++code) {
        const double expected = reference.value(code);
        const double value = values[code].item<double>();
        EXPECT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected)))
            << dtype << ' ' << wide << ' ' << code << ": " << value << ", not " << expected;
        EXPECT_TRUE(std::isnan(value) || std::signbit(value) == std::signbit(expected))
            << dtype << ' ' << code;
      }
    }
    EXPECT_EQ(torchamp::detail::largest_of(dtype), reference.largest());
  }
}

TEST(Fp8Formats, DecodingKeepsTheLayoutOfATransposedMatrix) {
  const at::Tensor codes = at::arange(12, at::kInt).to(at::kByte).view({3, 4}).t();
  const at::Tensor values = decode(codes.view(at::kFloat8_e4m3fn), at::kFloat);
  EXPECT_EQ(values.strides(), codes.strides());
  EXPECT_EQ(values[1][2].item<float>(), e4m3.value(9));
}

TEST(Fp8Quantize, CodesAndScalesEqualASlowReferenceBitForBit) {
  at::manual_seed(1);
  for (const auto& [dtype, reference] : formats) {
    for (const at::ScalarType from : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const double magnitude : {1e-6, 1e-3, 1., 447.9, 1e4}) {
        const at::Tensor matrix = (at::randn({9, 31}) * (magnitude / 4)).clamp(-6e4, 6e4).to(from);
        const auto quantized = quantize(matrix, dtype);
        const double scale = power_of_two_scale(largest_of(matrix), reference.largest());
        EXPECT_EQ(quantized.inverse_scale.item<double>(), 1 / scale) << dtype << from << magnitude;
        EXPECT_EQ(quantized.inverse_scale.dim(), 0);
        EXPECT_EQ(quantized.inverse_scale.scalar_type(), at::kFloat);
        EXPECT_EQ(quantized.codes.scalar_type(), dtype);
        const at::Tensor codes = quantized.codes.view(at::kByte).flatten();
        const at::Tensor values = matrix.to(at::kDouble).flatten();
        for (int64_t i = 0; i < codes.numel(); ++i) {
          ASSERT_EQ(codes[i].item<int>(), reference.nearest(values[i].item<double>() * scale))
              << dtype << from << magnitude << ' ' << values[i].item<double>();
        }
      }
    }
  }
}

// At scale 1, which the largest number of a format keeps: each number that a code stands for, the
// ties between two codes, and the fp32 numbers on either side of both.
TEST(Fp8Quantize, EachOf256CodesIsWhatItsNumberBecomesAndTiesGoToTheEvenCode) {
  for (const auto& [dtype, reference] : formats) {
    std::vector<float> numbers;
    for (int code = 0; code < 128; ++code) {
      const auto number = static_cast<float>(reference.value(code));
      if (!std::isfinite(number)) continue;
      const auto next = static_cast<float>(reference.value(code + 1));
      const float tie = std::isfinite(next) ? (number + next) / 2 : number;
      for (const float middle : {number, tie}) {
        for (const float near :
             {std::nextafter(middle, 0.F), middle, std::nextafter(middle, 1e9F)}) {
          if (near <= reference.largest()) numbers.insert(numbers.end(), {near, -near});
        }
      }
    }
    const auto quantized = quantize(at::tensor(numbers).unsqueeze(0), dtype);
    EXPECT_EQ(quantized.inverse_scale.item<double>(), 1);
    const at::Tensor codes = quantized.codes.view(at::kByte).flatten();
    std::set<int> met;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const int code = codes[static_cast<int64_t>(i)].item<int>();
      ASSERT_EQ(code, reference.nearest(numbers[i])) << dtype << ' ' << numbers[i];
      met.insert(code);
    }
    int finite = 0;
    for (int code = 0; code < 256; ++code) finite += std::isfinite(reference.value(code)) ? 1 : 0;
    EXPECT_EQ(met.size(), static_cast<std::size_t>(finite));
  }
}

// Where a scale a step larger would overflow, and one as large as it is just fits.
TEST(Fp8Quantize, TheScaleIsTheLargestPowerOfTwoThatDoesNotOverflow) {
  for (const auto& [dtype, reference] : formats) {
    for (const double start : {448., 57344., 1., 1.75, 7., 3e38, 1e-30}) {
      const auto value = static_cast<float>(start);
      for (const float magnitude :
           {std::nextafter(value, 0.F), value, std::nextafter(value, 3.3e38F)}) {
        const auto quantized = quantize(at::full({1, 1}, magnitude), dtype);
        EXPECT_EQ(quantized.inverse_scale.item<double>(),
                  1 / power_of_two_scale(magnitude, reference.largest()))
            << dtype << ' ' << magnitude;
        const double code = decode(quantized.codes, at::kFloat).item<double>();
        EXPECT_LE(code, reference.largest());
        EXPECT_GT(code * 2, reference.largest() * 0.99);
      }
    }
  }
}

TEST(Fp8Quantize, ZerosAndNothingAndOneElementHaveFiniteScales) {
  for (const auto& [dtype, reference] : formats) {
    for (const at::Tensor& matrix : {at::zeros({3, 4}), at::empty({0, 4}), at::full({1, 1}, -0.)}) {
      const auto quantized = quantize(matrix, dtype);
      EXPECT_TRUE(std::isfinite(quantized.inverse_scale.item<float>()));
      EXPECT_GT(quantized.inverse_scale.item<float>(), 0);
      EXPECT_TRUE(decode(quantized.codes, at::kFloat).eq(0).all().item<bool>());
      EXPECT_EQ(quantized.codes.sizes(), matrix.sizes());
    }
  }
}

TEST(Fp8Quantize, AnInfOrNanMakesTheScaleNanAndNever448) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto& [dtype, reference] : formats) {
    for (const at::ScalarType from : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
        at::Tensor matrix = at::ones({2, 3}, from);
        matrix[1][1].fill_(bad);
        EXPECT_TRUE(std::isnan(quantize(matrix, dtype).inverse_scale.item<float>()))
            << dtype << from << bad;
      }
    }
  }
}

TEST(Fp8Quantize, AScaleOfTheWholeMatrixChangesNoCode) {
  at::manual_seed(2);
  for (const auto& [dtype, reference] : formats) {
    const at::Tensor matrix = at::randn({8, 8}).to(at::kBFloat16);
    const auto plain = quantize(matrix, dtype);
    for (const double scale : {0x1p16, 0x1p40, 0x1p-30}) {
      const auto scaled = quantize(matrix * scale, dtype);
      EXPECT_TRUE(scaled.codes.view(at::kByte).equal(plain.codes.view(at::kByte)));
      EXPECT_EQ(scaled.inverse_scale.item<double>(), plain.inverse_scale.item<double>() * scale);
    }
  }
}

TEST(Fp8Quantize, StridesOfTheMatrixDoNotMatter) {
  at::manual_seed(3);
  const at::Tensor matrix = at::randn({6, 10});
  const at::Tensor expected = quantize(matrix, at::kFloat8_e4m3fn).codes.view(at::kByte);
  const at::Tensor wide = at::randn({6, 30});
  wide.slice(1, 0, 30, 3).copy_(matrix);
  for (const at::Tensor& same :
       {matrix.t().contiguous().t(), wide.slice(1, 0, 30, 3), matrix.unsqueeze(0).squeeze(0)}) {
    EXPECT_TRUE(quantize(same, at::kFloat8_e4m3fn).codes.view(at::kByte).equal(expected));
  }
  const at::Tensor row = matrix[0].expand({5, 10});
  EXPECT_TRUE(quantize(row, at::kFloat8_e4m3fn)
                  .codes.view(at::kByte)
                  .equal(quantize(row.contiguous(), at::kFloat8_e4m3fn).codes.view(at::kByte)));
}

class Fp8QuantizeOn : public testing::TestWithParam<at::DeviceType> {};
INSTANTIATE_TEST_SUITE_P(Devices, Fp8QuantizeOn, all_devices(), device_name);

/// Rows that are small, as small as numbers are, zero, or have an element that towers over others.
at::Tensor uneven_matrix(at::ScalarType dtype) {
  at::Tensor matrix = at::randn({9, 32});
  matrix[1].mul_(1e-6);
  matrix[2].mul_(1e-39);
  matrix[3].zero_();
  matrix[4][5] = 6e4;
  return matrix.to(dtype);
}

/// The same numbers, dense, transposed in memory, and as a part of a larger matrix.
std::vector<at::Tensor> layouts_of(const at::Tensor& matrix) {
  const at::Tensor wide = at::zeros({matrix.size(0), 2 * matrix.size(1)}, matrix.options());
  wide.slice(1, 0, matrix.size(1)).copy_(matrix);
  return {matrix, matrix.t().contiguous().t(), wide.slice(1, 0, matrix.size(1))};
}

/// Expects the codes of row `i` to equal the codes of the slow reference.
void expect_row(const at::Tensor& codes, const at::Tensor& matrix, int64_t i, double scale,
                const SmallFormat& reference) {
  const at::Tensor bytes = codes[i].view(at::kByte).to(at::kInt);
  const at::Tensor values = matrix[i].to(at::kDouble);
  for (int64_t j = 0; j < values.numel(); ++j) {
    ASSERT_EQ(bytes[j].item<int>(), reference.nearest(values[j].item<double>() * scale))
        << "of " << values[j].item<double>() << " in row " << i << " at scale " << scale;
  }
}

double scale_of(const at::Tensor& numbers, const SmallFormat& reference) {
  return power_of_two_scale(std::fmax(largest_of(numbers), 0x1p-110), reference.largest());
}

TEST_P(Fp8QuantizeOn, CodesOfAMatrixEqualASlowReferenceInEachLayout) {
  SKIP_WITHOUT(GetParam());
  at::manual_seed(4);
  for (const auto& [dtype, reference] : formats) {
    for (const at::ScalarType from : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor matrix = uneven_matrix(from);
      const double scale = scale_of(matrix, reference);
      for (const at::Tensor& same : layouts_of(matrix.to(GetParam()))) {
        SCOPED_TRACE(c10::str(dtype, from, same.strides()));
        const Fp8Matrix form = quantize(same, dtype);
        EXPECT_EQ(form.inverse_scale.item<double>(), 1 / scale);
        const at::Tensor codes = form.codes.cpu();
        for (int64_t i = 0; i < matrix.size(0); ++i) {
          expect_row(codes, matrix, i, scale, reference);
        }
      }
    }
  }
}

TEST_P(Fp8QuantizeOn, CodesOfRowsEqualASlowReferenceInEachLayout) {
  SKIP_WITHOUT(GetParam());
  at::manual_seed(5);
  for (const at::ScalarType from : {at::kFloat, at::kBFloat16}) {
    const at::Tensor matrix = uneven_matrix(from);
    for (const at::Tensor& same : layouts_of(matrix.to(GetParam()))) {
      SCOPED_TRACE(c10::str(from, same.strides()));
      const Fp8Matrix form = quantize_blocks(same, {1, 0});
      const at::Tensor codes = form.codes.cpu(), inverse = form.block_scales.cpu();
      if (GetParam() != at::kCPU) {
        EXPECT_TRUE(form.codes.is_contiguous()) << "products would copy it";
      }
      for (int64_t i = 0; i < matrix.size(0); ++i) {
        const double scale = scale_of(matrix[i], e4m3);
        EXPECT_EQ(inverse[i].item<double>(), 1 / scale);
        expect_row(codes, matrix, i, scale, e4m3);
      }
    }
  }
}

TEST_P(Fp8QuantizeOn, AnInfOrNanMakesTheScaleNanOfItsMatrixOrRowAlone) {
  SKIP_WITHOUT(GetParam());
  const float inf = std::numeric_limits<float>::infinity();
  for (const at::ScalarType from : {at::kFloat, at::kBFloat16}) {
    for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
      at::Tensor matrix = at::ones({3, 40}, from);
      matrix[1][33].fill_(bad);
      matrix = matrix.to(GetParam());
      EXPECT_TRUE(std::isnan(quantize(matrix, at::kFloat8_e4m3fn).inverse_scale.item<float>()));
      const at::Tensor inverse = quantize_blocks(matrix, {1, 0}).block_scales.cpu();
      for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(std::isnan(inverse[i].item<float>()), i == 1) << i;
    }
  }
}

}  // namespace
