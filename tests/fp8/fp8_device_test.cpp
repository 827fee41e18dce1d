// SPDX-License-Identifier: BSD-3-Clause
// The path of an accelerator: layouts, padding, and what it must not do. On the simulated one,
// whose `_scaled_mm` asks for what CUDA's asks for, and on a GPU where there is one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "simulated_device/counts.h"
#include "simulated_device/scaled_mm.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/fp8_reference.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/labs/module_policy.h"
#include "torchamp/torchamp.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;
namespace ops = torchamp::ops;

class Fp8Device : public ::testing::TestWithParam<at::DeviceType> {};
class Fp8SimulatedDevice : public Fp8Device {};

struct Result {
  torch::Tensor y, dx, dw;
};

Result run(const torch::Tensor& x, const torch::Tensor& w, const torch::Tensor& g,
           at::DeviceType device, at::ScalarType dtype, torchamp::Fp8Options options = {}) {
  const torch::Tensor x_there = x.to(device).requires_grad_();
  const torch::Tensor w_there = w.to(device).requires_grad_();
  const AutocastGuard guard(
      device, {.dtype = dtype, .policy = torchamp::fp8(Policy::standard(), ops::dense, options)});
  const torch::Tensor y = torch::linear(x_there, w_there);
  y.backward(g.to(device));
  return {y.detach().cpu(), x_there.grad().cpu(), w_there.grad().cpu()};
}

const std::vector<std::vector<int64_t>> kShapes = {{16, 16, 16}, {32, 48, 16}, {5, 16, 32},
                                                   {16, 17, 16}, {3, 9, 21},   {1, 1, 1},
                                                   {0, 4, 3},    {2, 0, 3},    {7, 31, 40}};

TEST_P(Fp8Device, AgreesExactlyWithTheRehearsalIfSumsAreExact) {
  SKIP_WITHOUT(GetParam());
  torch::manual_seed(1);
  for (const auto& shape : kShapes) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const torch::Tensor x = torch::randint(-3, 4, {shape[0], shape[1]}).to(torch::kFloat);
      const torch::Tensor w = torch::randint(-1, 2, {shape[2], shape[1]}).to(torch::kFloat);
      const torch::Tensor g = torch::randint(-2, 3, {shape[0], shape[2]}).to(dtype);
      const Result there = run(x, w, g, GetParam(), dtype);
      const Result here = run(x, w, g, at::kCPU, dtype);
      EXPECT_TRUE(there.y.equal(here.y)) << shape << dtype;
      EXPECT_TRUE(there.dx.equal(here.dx)) << shape << dtype;
      EXPECT_TRUE(there.dw.equal(here.dw)) << shape << dtype;
    }
  }
}

TEST_P(Fp8Device, ScalesOfRowsAgreeWithTheRehearsalForwardAndBackward) {
  SKIP_WITHOUT(GetParam());
  torch::manual_seed(2);
  const torchamp::Fp8Options rowwise{.recipe = torchamp::Fp8Recipe::rowwise, .strict = true};
  for (const auto& shape : kShapes) {
    // Rows and columns of different magnitudes, so that a scale in a wrong place shows.
    const torch::Tensor rows = torch::exp2(torch::randint(-4, 5, {shape[0], 1})).to(torch::kFloat);
    const torch::Tensor columns =
        torch::exp2(torch::randint(-4, 5, {1, shape[2]})).to(torch::kFloat);
    const torch::Tensor x = torch::randint(-3, 4, {shape[0], shape[1]}).to(torch::kFloat) * rows;
    const torch::Tensor w = torch::randint(-1, 2, {shape[2], shape[1]}) * columns.t();
    const torch::Tensor g =
        (torch::randint(-2, 3, {shape[0], shape[2]}) / columns / rows).to(at::kBFloat16);
    const Result there = run(x, w, g, GetParam(), at::kBFloat16, rowwise);
    const Result here = run(x, w, g, at::kCPU, at::kBFloat16, rowwise);
    EXPECT_TRUE(there.y.equal(here.y)) << shape;
    EXPECT_TRUE(there.dx.equal(here.dx)) << shape;
    EXPECT_TRUE(there.dw.equal(here.dw)) << shape;
    if (shape[0] * shape[1] * shape[2] == 0) continue;
    const auto magnitude = [](const torch::Tensor& t) { return t.abs().sum().item<double>(); };
    EXPECT_GT(magnitude(here.y) + magnitude(here.dx) + magnitude(here.dw), 0) << shape;
  }
}

TEST_P(Fp8Device, ScalesOfRowsInFp16RunInLowerPrecisionAndTheReportSaysWhy) {
  SKIP_WITHOUT(GetParam());
  const torch::Tensor x = torch::ones({4, 16}).to(GetParam()),
                      w = torch::ones({8, 16}).to(GetParam());
  torchamp::CastRecorder recorder;
  {
    const Policy policy =
        torchamp::fp8(Policy::standard(), ops::dense, {.recipe = torchamp::Fp8Recipe::rowwise});
    const AutocastGuard guard(GetParam(), {.dtype = at::kHalf, .policy = policy});
    EXPECT_EQ(torch::linear(x, w).scalar_type(), at::kHalf);
  }
  EXPECT_EQ(recorder.report().total().not_fp8.at("rowwise products of a GPU are in bf16 only"), 1);
}

TEST_P(Fp8Device, StrictScalesOfRowsAreAnErrorOfTheGuardInFp16) {
  SKIP_WITHOUT(GetParam());
  const torchamp::Fp8Options rowwise{.recipe = torchamp::Fp8Recipe::rowwise, .strict = true};
  const Policy strict = torchamp::fp8(Policy::standard(), ops::dense, rowwise);
  EXPECT_ERROR(const AutocastGuard made(GetParam(), {.dtype = at::kHalf, .policy = strict}),
               " cannot follow it in a region in Half: rowwise products of a GPU are in bf16 only");
  EXPECT_FALSE(at::autocast::is_autocast_enabled(GetParam()));
  const Policy second = torchamp::fp8(torchamp::fp8(Policy::standard(), {"mm"}, {.strict = true}),
                                      {"addmm"}, rowwise);
  EXPECT_ERROR(const AutocastGuard made(GetParam(), {.dtype = at::kHalf, .policy = second}),
               "rowwise products of a GPU are in bf16 only");
  const AutocastGuard in_bf16(GetParam(), {.dtype = at::kBFloat16, .policy = strict});
  const AutocastGuard on_a_cpu(at::kCPU, {.dtype = at::kHalf, .policy = strict});
  // A rule for bf16 alone says nothing of a region in fp16.
  const Policy bf16_alone =
      torchamp::fp8(Policy::standard(), ops::dense, rowwise, {.dtype = at::kBFloat16});
  const AutocastGuard in_fp16(GetParam(), {.dtype = at::kHalf, .policy = bf16_alone});
}

TEST_P(Fp8Device, AModulesStrictRuleIsAnErrorOfItsForward) {
  SKIP_WITHOUT(GetParam());
  const torchamp::Fp8Options rowwise{.recipe = torchamp::Fp8Recipe::rowwise, .strict = true};
  const torch::Tensor x = torch::ones({4, 16}).to(GetParam());
  torch::nn::Sequential model(
      torch::nn::Functional([](const torch::Tensor& of) { return torch::linear(of, of); }));
  torchamp::ModulePolicies{{"0", torchamp::fp8(Policy::standard(), ops::dense, rowwise)}}.apply_to(
      *model);
  EXPECT_EQ(model->forward(x).scalar_type(), at::kFloat);  // no region
  {
    const AutocastGuard in_fp16(GetParam(), at::kHalf);
    EXPECT_ERROR(model->forward(x), "ModulePolicies: the policy's fp8 rule is strict, and ");
    EXPECT_EQ(torch::linear(x, x).scalar_type(), at::kHalf);  // under the guard's own policy again
  }
  const AutocastGuard in_bf16(GetParam(), at::kBFloat16);
  EXPECT_EQ(model->forward(x).scalar_type(), at::kBFloat16);
}

TEST_P(Fp8SimulatedDevice, AnInactiveStrictRuleRequiresNothingOfTheDevice) {
  SKIP_WITHOUT(GetParam());
  const simulated::NoFp8Units old_device;
  const torchamp::Fp8Options strict{.strict = true};
  {
    const Policy replaced = torchamp::fp8(Policy::standard(), ops::dense, strict).fp32(ops::dense);
    const AutocastGuard guard(GetParam(), {.dtype = at::kHalf, .policy = replaced});
  }
  const Policy bf16_alone =
      torchamp::fp8(Policy::standard(), ops::dense, strict, {.dtype = at::kBFloat16});
  const AutocastGuard in_fp16(GetParam(), {.dtype = at::kHalf, .policy = bf16_alone});
  EXPECT_ERROR(
      const AutocastGuard in_bf16(GetParam(), {.dtype = at::kBFloat16, .policy = bf16_alone}),
      "AutocastGuard: the policy's fp8 rule is strict, and ");
}

struct Operands {
  torch::Tensor x, w, g;
};

Operands random_operands(const std::vector<int64_t>& shape) {
  return {torch::randn({shape[0], shape[1]}) * 1e-3, torch::randn({shape[2], shape[1]}) * 30,
          torch::randn({shape[0], shape[2]}).to(at::kBFloat16) * 1e4};
}

/// Expects `there` within what units that keep 14 bits of their sums may do.
void expect_units(const Result& there, const Result& here, const Operands& of) {
  const auto expect = [](const torch::Tensor& actual, const torch::Tensor& expected,
                         const torch::Tensor& a, const torch::Tensor& b, const char* name) {
    const torch::Tensor off = (actual.to(at::kDouble) - expected.to(at::kDouble)).abs();
    EXPECT_TRUE(off.le(fp8_units_tolerance(expected, a, b)).all().item<bool>())
        << name << ", off by up to " << (off.numel() == 0 ? 0. : off.max().item<double>());
  };
  expect(there.y, here.y, of.x, of.w.t(), "y");
  expect(there.dx, here.dx, of.g, of.w, "dx");
  expect(there.dw, here.dw, of.g.t(), of.x, "dw");
}

TEST_P(Fp8Device, AgreesWithTheRehearsalToThePrecisionOfItsSums) {
  SKIP_WITHOUT(GetParam());
  torch::manual_seed(2);
  for (const auto& shape : kShapes) {
    SCOPED_TRACE(c10::str(shape));
    const Operands of = random_operands(shape);
    const Result there = run(of.x, of.w, of.g, GetParam(), at::kBFloat16);
    const Result here = run(of.x, of.w, of.g, at::kCPU, at::kBFloat16);
    expect_units(there, here, of);
    if (GetParam() == at::kCUDA) continue;
    const double step = 0x1p-7;  // the simulated device's sums are in fp32, in another order
    EXPECT_TRUE(there.y.allclose(here.y, step, 1e-4));
    EXPECT_TRUE(there.dx.allclose(here.dx, step, 1));
    EXPECT_TRUE(there.dw.allclose(here.dw, step, 1e-3));
  }
}

/// `a` times `b` as the units of a GPU of compute capability 9.0: of 32 products, and of the sum
/// before them, the 14 highest bits below the largest are added.
torch::Tensor product_of_units(const torch::Tensor& a, const torch::Tensor& b) {
  const auto left = a.to(at::kDouble).contiguous(), right = b.to(at::kDouble).contiguous();
  const torch::Tensor result = torch::zeros({a.size(0), b.size(1)}, at::kDouble);
  const auto l = left.accessor<double, 2>(), r = right.accessor<double, 2>();
  auto sums = result.accessor<double, 2>();
  for (int64_t i = 0; i < a.size(0); ++i) {
    for (int64_t j = 0; j < b.size(1); ++j) {
      double sum = 0;
      for (int64_t begin = 0; begin < a.size(1); begin += 32) {
        std::vector<double> terms{sum};
        for (int64_t k = begin; k < std::min(begin + 32, a.size(1)); ++k) {
          terms.push_back(l[i][k] * r[k][j]);
        }
        double largest = 0;
        for (const double term : terms) largest = std::max(largest, std::abs(term));
        int exponent = 0;
        (void)std::frexp(largest, &exponent);
        const double last_bit = std::ldexp(1., exponent - 14);
        sum = 0;
        for (const double term : terms) sum += std::trunc(term / last_bit) * last_bit;
      }
      sums[i][j] = sum;
    }
  }
  return result.to(at::kBFloat16);
}

TEST(Fp8Rehearsal, IsWithinItsPromiseOfUnitsThatKeep14BitsOfTheirSums) {
  torch::manual_seed(2);
  int64_t differ = 0;
  for (const auto& shape : {kShapes[1], kShapes[1], kShapes[2], kShapes[8]}) {
    const Operands of = random_operands(shape);
    // A product with ones on the diagonal shows an operand as it is quantised.
    const auto shown = [&](const torch::Tensor& x, const torch::Tensor& g, int64_t size) {
      return run(x, torch::eye(size), g, at::kCPU, at::kBFloat16);
    };
    const auto x = shown(of.x, torch::zeros_like(of.x).to(at::kBFloat16), shape[1]).y;
    const auto w = shown(of.w, torch::zeros_like(of.w).to(at::kBFloat16), shape[1]).y;
    const auto g = shown(torch::zeros({shape[0], shape[2]}), of.g, shape[2]).dx;
    const Result units{product_of_units(x, w.t()), product_of_units(g, w),
                       product_of_units(g.t(), x)};
    const Result here = run(of.x, of.w, of.g, at::kCPU, at::kBFloat16);
    expect_units(units, here, of);
    differ += here.dw.to(at::kBFloat16).ne(units.dw).sum().item<int64_t>();
  }
  EXPECT_GT(differ, 0) << "these units add as the rehearsal does";
}

TEST_P(Fp8SimulatedDevice, ReadsAndCopiesNothing) {
  SKIP_WITHOUT(GetParam());
  const torch::Tensor x = torch::randn({6, 20}).to(GetParam()).requires_grad_();
  const torch::Tensor w = torch::randn({9, 20}).to(GetParam()).requires_grad_();
  const AutocastGuard guard(GetParam(), {.policy = torchamp::fp8(Policy::standard(), ops::dense)});
  const simulated::Counts counts;
  torch::linear(x, w).sum().backward();
  EXPECT_EQ(counts.now().waits, 0);
  EXPECT_EQ(counts.now().device_to_host, 0);
  EXPECT_EQ(counts.now().host_to_device, 0);
}

TEST_P(Fp8SimulatedDevice, WithoutFp8UnitsCallsRunInLowerPrecisionAndTheReportSaysWhy) {
  SKIP_WITHOUT(GetParam());
  const simulated::NoFp8Units old_device;
  const torch::Tensor x = torch::ones({4, 16}).to(GetParam()),
                      w = torch::ones({8, 16}).to(GetParam());
  torchamp::CastRecorder recorder;
  {
    const AutocastGuard guard(
        GetParam(), {.dtype = at::kHalf, .policy = torchamp::fp8(Policy::standard(), ops::dense)});
    EXPECT_EQ(torch::linear(x, w).scalar_type(), at::kHalf);
  }
  const auto total = recorder.report().total();
  EXPECT_EQ(total.fp8, 0);
  ASSERT_EQ(total.not_fp8.size(), 1u) << recorder.report();
  EXPECT_NE(total.not_fp8.begin()->first.find("compute capability"), std::string::npos);

  const Policy strict = torchamp::fp8(Policy::standard(), ops::dense, {.strict = true});
  EXPECT_ERROR(const AutocastGuard made(GetParam(), {.dtype = at::kHalf, .policy = strict}),
               "AutocastGuard: the policy's fp8 rule is strict, and ");
  EXPECT_FALSE(at::autocast::is_autocast_enabled(GetParam()));
  const AutocastGuard here(at::kCPU, {.policy = strict});
  EXPECT_EQ(torch::linear(torch::ones({4, 16}), torch::ones({8, 16})).scalar_type(), at::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(Devices, Fp8Device, ::testing::Values(at::kCUDA, at::kPrivateUse1),
                         device_name);
INSTANTIATE_TEST_SUITE_P(Devices, Fp8SimulatedDevice, simulated_device(), device_name);

}  // namespace
