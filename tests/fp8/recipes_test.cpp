// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/fp8/recipes.h"

#include <c10/util/Float8_e8m0fnu.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/fp8_reference.h"
#include "torchamp/detail/fp8/product.h"
#include "torchamp/torchamp.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Fp8Options;
using torchamp::Fp8Recipe;
using torchamp::Policy;
using torchamp::detail::decoded;
using torchamp::detail::Fp8Operand;
using torchamp::detail::hadamard_transformed;
using torchamp::detail::quantize_as;
using torchamp::detail::rounded_to_e2m1;

constexpr Fp8Recipe recipes[] = {Fp8Recipe::tensorwise, Fp8Recipe::rowwise, Fp8Recipe::blockwise,
                                 Fp8Recipe::mxfp8, Fp8Recipe::nvfp4};

/// What the recipe makes of an operand, or of its transpose, slowly and in fp64. NVFP4's transposes
/// of inputs and gradients after their transform.
at::Tensor reference(Fp8Recipe recipe, Fp8Operand operand, bool transposed, at::Tensor matrix) {
  const bool is_weight = operand == Fp8Operand::weight;
  switch (recipe) {
    case Fp8Recipe::tensorwise:
      return through(operand == Fp8Operand::gradient ? e5m2 : e4m3, matrix);
    case Fp8Recipe::rowwise:
      return through_blocks(matrix, 1, matrix.size(1));
    case Fp8Recipe::blockwise:
      return through_blocks(matrix, is_weight ? 128 : 1, 128);
    case Fp8Recipe::mxfp8:
      return through_blocks(matrix, 1, 32);
    case Fp8Recipe::nvfp4:
      if (transposed && !is_weight) matrix = hadamard_transformed(matrix);
      return through_nvfp4(matrix, is_weight ? 16 : 1);
  }
  return {};
}

at::Tensor quantized(Fp8Recipe recipe, Fp8Operand operand, bool transposed,
                     const at::Tensor& matrix) {
  const Fp8Options options{.recipe = recipe, .stochastic_rounding = false};
  const auto form = quantize_as(options, operand, transposed, matrix);
  at::Tensor values = decoded(form, at::kFloat).to(at::kDouble);
  if (form.inverse_scale.defined()) values = values * form.inverse_scale.to(at::kDouble);
  return values;
}

TEST(Fp8Recipes, ValuesAreThoseOfASlowReferenceToTheBit) {
  torch::manual_seed(1);
  const std::vector<std::vector<int64_t>> shapes = {{16, 32}, {5, 37}, {1, 1}, {3, 140}, {130, 3}};
  for (const Fp8Recipe recipe : recipes) {
    for (const auto operand : {Fp8Operand::input, Fp8Operand::weight, Fp8Operand::gradient}) {
      for (const bool transposed : {false, true}) {
        for (const auto& shape : shapes) {
          // Some rows are tiny, some zero, some have an element that towers over the others.
          at::Tensor matrix = torch::randn(shape);
          if (shape[0] > 3) {
            matrix[0].mul_(1e-6);
            matrix[1].zero_();
            matrix[2][0].mul_(1000);
          }
          matrix = matrix.to(at::kBFloat16).to(at::kFloat);
          for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            const at::Tensor values = quantized(recipe, operand, transposed, matrix.to(dtype));
            at::Tensor expected = reference(recipe, operand, transposed, matrix);
            if (values.size(1) > expected.size(1)) {
              expected = at::constant_pad_nd(expected, {0, values.size(1) - expected.size(1)});
            }
            EXPECT_TRUE(values.equal(expected))
                << static_cast<int>(recipe) << static_cast<int>(operand) << transposed << dtype
                << testing::PrintToString(shape) << ' ' << (values - expected).abs().max();
          }
        }
      }
    }
  }
}

TEST(Fp8Recipes, LayersAreThoseOfASlowReference) {
  torch::manual_seed(2);
  for (const Fp8Recipe recipe : recipes) {
    for (const auto& shape : {std::vector<int64_t>{3, 5, 7}, {17, 131, 20}}) {
      const torch::Tensor x = torch::randn({shape[0], shape[1]}).requires_grad_();
      const torch::Tensor w = torch::randn({shape[2], shape[1]}).requires_grad_();
      const torch::Tensor g = torch::randn({shape[0], shape[2]}).to(at::kBFloat16);
      torch::Tensor y;
      {
        const Fp8Options options{.recipe = recipe, .stochastic_rounding = false};
        const AutocastGuard guard(
            at::kCPU, {.policy = Policy::standard().fp8(torchamp::ops::dense, options)});
        y = torch::linear(x, w);
      }
      y.backward(g);
      const auto of = [&](Fp8Operand operand, bool transposed, const torch::Tensor& matrix) {
        return reference(recipe, operand, transposed,
                         (transposed ? matrix.t() : matrix).to(at::kFloat));
      };
      const auto expect = [&](const torch::Tensor& result, const torch::Tensor& a,
                              const torch::Tensor& b) {
        const torch::Tensor expected = a.mm(b.t());
        const torch::Tensor bound = expected.abs() * 0x1p-8 + a.abs().mm(b.abs().t()) * 0x1p-20;
        EXPECT_TRUE(((result.to(at::kDouble) - expected).abs() <= bound).all().item<bool>())
            << static_cast<int>(recipe) << ' ' << (result - expected).abs().max();
      };
      using enum Fp8Operand;
      expect(y.detach(), of(input, false, x.detach()), of(weight, false, w.detach()));
      expect(x.grad(), of(gradient, false, g), of(weight, true, w.detach()));
      expect(w.grad(), of(gradient, true, g), of(input, true, x.detach()));
    }
  }
}

TEST(Fp8Recipes, ProductsOfSmallIntegersAreExactWhereTheFormatHoldsThem) {
  torch::manual_seed(3);
  for (const Fp8Recipe recipe : recipes) {
    const torch::Tensor x = torch::randint(-1, 2, {17, 40}).to(at::kFloat).requires_grad_();
    const torch::Tensor w = torch::randint(-1, 2, {9, 40}).to(at::kFloat).requires_grad_();
    const torch::Tensor g = torch::randint(-1, 2, {17, 9}).to(at::kBFloat16);
    const AutocastGuard guard(
        at::kCPU, {.policy = Policy::standard().fp8(torchamp::ops::dense, {.recipe = recipe})});
    const torch::Tensor y = torch::linear(x, w);
    y.backward(g);
    if (recipe == Fp8Recipe::nvfp4) continue;  // 1 is 6 times a rounded sixth there
    EXPECT_TRUE(y.to(at::kFloat).equal(x.mm(w.t()).to(at::kFloat)));
    EXPECT_TRUE(x.grad().equal(g.to(at::kFloat).mm(w)));
    EXPECT_TRUE(w.grad().equal(g.to(at::kFloat).t().mm(x)));
  }
}

TEST(Fp8Recipes, AnInfOrNanIsNeverHidden) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Fp8Recipe recipe : recipes) {
    for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
      torch::Tensor x = torch::ones({3, 40});
      x[1][33] = bad;
      const torch::Tensor w = torch::ones({2, 40}).requires_grad_();
      const AutocastGuard guard(
          at::kCPU, {.policy = Policy::standard().fp8(torchamp::ops::dense, {.recipe = recipe})});
      const torch::Tensor y = torch::linear(x, w);
      EXPECT_TRUE(y[1].isnan().all().item<bool>()) << static_cast<int>(recipe);
      y.sum().backward();
      EXPECT_TRUE(w.grad().isnan().any().item<bool>()) << static_cast<int>(recipe);
    }
  }
}

TEST(Fp8Recipes, EmptyMatricesGiveZeros) {
  for (const Fp8Recipe recipe : recipes) {
    const AutocastGuard guard(
        at::kCPU, {.policy = Policy::standard().fp8(torchamp::ops::dense, {.recipe = recipe})});
    for (const auto& shape : {std::vector<int64_t>{0, 4, 3}, {2, 0, 3}, {2, 4, 0}}) {
      const torch::Tensor x = torch::ones({shape[0], shape[1]}).requires_grad_();
      const torch::Tensor w = torch::ones({shape[2], shape[1]}).requires_grad_();
      torch::linear(x, w).sum().backward();
      EXPECT_EQ(x.grad().abs().sum().item<double>(), 0);
      EXPECT_EQ(w.grad().abs().sum().item<double>(), 0);
    }
  }
}

TEST(Fp8Recipes, ALossScaledByAPowerOfTwoHasGradientsScaledByIt) {
  for (const Fp8Recipe recipe : recipes) {
    std::vector<torch::Tensor> gradients;
    for (const double scale : {1., 0x1p16}) {
      torch::manual_seed(4);
      const torch::Tensor x = torch::randn({8, 40}), w = torch::randn({6, 40}).requires_grad_();
      const torch::Tensor g = torch::randn({8, 6}).to(at::kBFloat16);
      const AutocastGuard guard(
          at::kCPU, {.policy = Policy::standard().fp8(torchamp::ops::dense, {.recipe = recipe})});
      torch::linear(x, w).backward(g * scale);
      gradients.push_back(w.grad() / scale);
    }
    EXPECT_TRUE(gradients[0].equal(gradients[1])) << static_cast<int>(recipe);
  }
}

/// The form of one row of an input.
auto form_of_row(Fp8Recipe recipe, const at::Tensor& row) {
  return quantize_as({.recipe = recipe}, Fp8Operand::input, false, row.view({1, -1}));
}

// A block whose largest magnitude is 448 times a code's value has that scale, and 225 times is the
// other end. fp32 holds no such block for the eight codes at the top; the nine at the bottom are
// those of magnitudes below 2^-110, which are scaled as that one.
TEST(Fp8Mxfp8, EachOf256CodesOfE8m0IsTheScaleOfItsBlock) {
  for (int code = 0; code < 256; ++code) {
    const c10::Float8_e8m0fnu known(static_cast<std::uint8_t>(code),
                                    c10::Float8_e8m0fnu::from_bits());
    const double value = e8m0_value(code);
    if (code == 255) {
      EXPECT_TRUE(std::isnan(static_cast<float>(known)));
      continue;
    }
    EXPECT_EQ(static_cast<double>(static_cast<float>(known)), value) << code;
    for (const double of_block : {225., 256., 447., 448.}) {
      const auto magnitude = static_cast<float>(of_block * value);
      const auto form = form_of_row(Fp8Recipe::mxfp8, at::full({32}, -magnitude, at::kFloat));
      const float scale = form.block_scales.item<float>();
      if (!std::isfinite(magnitude)) {
        EXPECT_GE(code, 247);
        EXPECT_TRUE(std::isnan(scale)) << code;
        continue;
      }
      EXPECT_LE(code, 247);
      EXPECT_EQ(scale, code < 9 ? 0x1p-118 : value) << code << ' ' << of_block;
      const int as_e8m0 = c10::Float8_e8m0fnu(scale).x;
      EXPECT_EQ(as_e8m0, std::max(code, 9));
      const double slow = e4m3.value(e4m3.nearest(magnitude / static_cast<double>(scale)));
      EXPECT_EQ(decoded(form, at::kFloat)[0][0].item<double>(), static_cast<float>(-slow * scale));
    }
  }
}

TEST(Fp8Mxfp8, AnInfOrNanInABlockIsTheNanOfE8m0) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
    at::Tensor row = at::ones({64});
    row[40].fill_(bad);
    const at::Tensor scales = form_of_row(Fp8Recipe::mxfp8, row).block_scales;
    EXPECT_EQ(scales[0][0].item<double>(), 0x1p-8);
    const int code = c10::Float8_e8m0fnu(scales[0][1].item<float>()).x;
    EXPECT_EQ(code, 255);
  }
}

TEST(Fp8Nvfp4, AllCodesOfE2m1AreWhatRoundingToTheNearestGives) {
  std::vector<float> numbers;
  for (int code = 0; code < e2m1.codes() / 2; ++code) {
    const auto number = static_cast<float>(e2m1.value(code));
    const auto next = static_cast<float>(e2m1.value(std::min(code + 1, 7)));
    for (const float middle : {number, (number + next) / 2}) {  // itself, a tie
      for (const float near : {std::nextafter(middle, 0.F), middle, std::nextafter(middle, 9.F)}) {
        if (near <= 6) numbers.insert(numbers.end(), {near, -near});
      }
    }
    for (const bool stochastic : {false, true}) {
      for (const float sign : {1.F, -1.F}) {
        const auto same = rounded_to_e2m1(at::full({1}, sign * number), stochastic).item<float>();
        EXPECT_EQ(same, sign * number);
        EXPECT_EQ(std::signbit(same), std::signbit(sign * number));
      }
    }
  }
  for (float number = -6; number <= 6; number += 0x1p-7F) numbers.push_back(number);
  const at::Tensor rounded = rounded_to_e2m1(at::tensor(numbers), false);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const float result = rounded[static_cast<int64_t>(i)].item<float>();
    ASSERT_EQ(result, e2m1.value(e2m1.nearest(numbers[i]))) << numbers[i];
    ASSERT_EQ(std::signbit(result), std::signbit(numbers[i])) << numbers[i];
  }
}

// Each positive code of e4m3, and in each block all of e2m1: what the format holds stays as it is.
TEST(Fp8Nvfp4, EachScaleOfE4m3WithAllCodesOfE2m1IsKeptToTheBit) {
  std::vector<float> numbers;
  for (int scale = 1; scale < 127; ++scale) {
    for (int code = 0; code < 16; ++code) {
      numbers.push_back(static_cast<float>(e4m3.value(scale) * e2m1.value(code)));
    }
  }
  const at::Tensor matrix = at::tensor(numbers);
  const auto form = form_of_row(Fp8Recipe::nvfp4, matrix);
  EXPECT_EQ(form.inverse_scale.item<double>(), 1);
  const at::Tensor codes = form.block_scales.view(at::kByte).flatten();
  EXPECT_TRUE(codes.equal(at::arange(1, 127, at::kByte)));
  EXPECT_TRUE(decoded(form, at::kFloat)[0].equal(matrix));
  EXPECT_TRUE(decoded(form, at::kBFloat16)[0].to(at::kFloat).equal(matrix));
}

TEST(Fp8Nvfp4, StochasticRoundingIsRightOnAverageAndRepeatsItself) {
  for (const double number : {0.1, 0.25, 1.3, 2.5, 3.9, 4.2, 5.5, -5.5}) {
    torch::manual_seed(5);
    const at::Tensor numbers = at::full({20000}, number, at::kFloat);
    const at::Tensor rounded = rounded_to_e2m1(numbers, true);
    EXPECT_NEAR(rounded.mean().item<double>(), number, 0.03);
    EXPECT_EQ(std::get<0>(at::_unique(rounded)).numel(), 2);
    torch::manual_seed(5);
    EXPECT_TRUE(rounded_to_e2m1(numbers, true).equal(rounded));
  }
}

TEST(Fp8Nvfp4, TheHadamardTransformIsOrthogonalAndLeavesProductsAsTheyAre) {
  torch::manual_seed(6);
  const at::Tensor by = hadamard_transformed(at::eye(16));
  EXPECT_TRUE(by.mm(by.t()).equal(at::eye(16)));
  const at::Tensor a = at::randint(-4, 5, {3, 37}).to(at::kFloat);
  const at::Tensor b = at::randint(-4, 5, {5, 37}).to(at::kFloat);
  EXPECT_TRUE(hadamard_transformed(a).mm(hadamard_transformed(b).t()).equal(a.mm(b.t())));
}

TEST(Fp8Recipes, EachTrains) {
  for (const Fp8Recipe recipe : recipes) {
    torch::manual_seed(7);
    torch::nn::Sequential model(torch::nn::Linear(16, 48), torch::nn::Tanh(),
                                torch::nn::Linear(48, 4));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const torch::Tensor x = torch::randn({64, 16}), target = x.narrow(1, 0, 4).sin();
    const Policy policy = Policy::standard().fp8(torchamp::ops::dense, {.recipe = recipe});
    double first = 0, last = 0;
    for (int step = 0; step < 25; ++step) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const AutocastGuard guard(at::kCPU, {.policy = policy});
        loss = torch::mse_loss(model->forward(x), target);
      }
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
      if (step == 0) first = last;
    }
    EXPECT_LT(last, first * 0.9) << static_cast<int>(recipe);
  }
}

}  // namespace
