// SPDX-License-Identifier: BSD-3-Clause
// Operands, scales and products against what Python's _scaled_mm made of the same matrices.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/numbers.h"
#include "torchamp/labs/detail/fp8/function.h"
#include "torchamp/labs/detail/fp8/quantize.h"

namespace {

using torchamp::Fp8Recipe;
using torchamp::detail::Fp8Operand;

std::vector<double> numbers_of(std::istream& line) {
  std::vector<double> numbers;
  std::string word;
  while (line >> word && word != "|") numbers.push_back(std::stod(word));
  return numbers;
}

at::Tensor tensor_of(std::istream& line) {
  return torch::tensor(numbers_of(line), at::kDouble);
}

TEST(Fp8Record, PythonsScaledMmGivesTheSame) {
  std::ifstream file(std::string(TORCHAMP_TEST_PARITY_DIR) + "/scaled_mm.txt");
  ASSERT_TRUE(file);
  Numbers numbers(7);
  int lines = 0;
  for (std::string text; std::getline(file, text); ++lines) {
    std::istringstream line(text);
    std::string name;
    line >> name;
    SCOPED_TRACE(text.substr(0, text.find('|')));
    const std::vector<double> sizes = numbers_of(line);
    const auto m = static_cast<int64_t>(sizes[0]), k = static_cast<int64_t>(sizes[1]),
               n = static_cast<int64_t>(sizes[2]);
    const torchamp::Fp8Options options{.recipe = name == "rowwise" ? Fp8Recipe::rowwise
                                                                   : Fp8Recipe::tensorwise};
    const auto a = quantize_as(options, Fp8Operand::input, false, numbers.tensor({m, k}));
    const auto b = quantize_as(options, Fp8Operand::weight, false, numbers.tensor({n, k}));
    const auto codes_of = [](const auto& form) {
      return form.codes.view(at::kByte).flatten().to(at::kDouble);
    };
    const auto scales_of = [](const auto& form) {
      const at::Tensor scales =
          form.block_scales.defined() ? form.block_scales : form.inverse_scale;
      return scales.flatten().to(at::kDouble);
    };
    EXPECT_TRUE(codes_of(a).equal(tensor_of(line)));
    EXPECT_TRUE(codes_of(b).equal(tensor_of(line)));
    EXPECT_TRUE(scales_of(a).equal(tensor_of(line)));
    EXPECT_TRUE(scales_of(b).equal(tensor_of(line)));
    const at::Tensor product = fp8_product(a, b, at::kBFloat16, /*fast=*/true).flatten();
    const at::Tensor expected = tensor_of(line);
    const at::Tensor bound = expected.abs() * 0x1p-7 + 1e-6;  // a step of bf16
    EXPECT_TRUE(((product - expected).abs() <= bound).all().item<bool>()) << product << expected;
  }
  EXPECT_EQ(lines, 8);
}

}  // namespace
