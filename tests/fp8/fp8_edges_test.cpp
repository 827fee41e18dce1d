// SPDX-License-Identifier: BSD-3-Clause
// Where a call, a weight or a region is out of the ordinary.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/expect_error.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/torchamp.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Fp8Recipe;
using torchamp::Policy;

constexpr Fp8Recipe each_recipe[] = {Fp8Recipe::tensorwise, Fp8Recipe::rowwise,
                                     Fp8Recipe::blockwise, Fp8Recipe::mxfp8, Fp8Recipe::nvfp4};

/// Rounded to the nearest, so that it can be computed twice.
torchamp::AutocastOptions in_fp8(Fp8Recipe recipe = Fp8Recipe::tensorwise) {
  static std::map<Fp8Recipe, Policy> policies;
  auto found = policies.find(recipe);
  if (found == policies.end()) {
    Policy policy = Policy::standard();
    policy = torchamp::fp8(policy, torchamp::ops::dense,
                           {.recipe = recipe, .stochastic_rounding = false});
    found = policies.emplace(recipe, policy).first;
  }
  return {.policy = found->second};
}

/// x w^T under a separate guard, with an empty cache.
torch::Tensor alone(Fp8Recipe recipe, const torch::Tensor& x, const torch::Tensor& w) {
  const torch::NoGradGuard no_grad;
  const AutocastGuard guard(torch::kCPU, in_fp8(recipe));
  return torch::linear(x.detach().clone(), w.detach().contiguous().clone());
}

TEST(Fp8Edges, PartsAndTransposesOfOneWeightAreDistinguished) {
  torch::manual_seed(1);
  for (const Fp8Recipe recipe : each_recipe) {
    const torch::Tensor w = torch::randn({32, 16}).requires_grad_();
    const torch::Tensor x = torch::randn({4, 16}).requires_grad_();
    const AutocastGuard guard(torch::kCPU, in_fp8(recipe));
    for (int again = 0; again < 2; ++again) {
      const torch::Tensor top = w.narrow(0, 0, 16), bottom = w.narrow(0, 16, 16);
      for (const torch::Tensor& part :
           {top, bottom, top.t(), bottom.t(), w.slice(0, 0, 32, 2),
            w.view({16, 32}).narrow(1, 8, 16), w.narrow(0, 3, 1).expand({16, 16}), w}) {
        EXPECT_TRUE(torch::linear(x, part).equal(alone(recipe, x, part)))
            << static_cast<int>(recipe) << part.sizes() << part.strides();
      }
    }
  }
}

TEST(Fp8Edges, AWeightThatChangesThroughAViewIsSeen) {
  torch::manual_seed(2);
  for (const Fp8Recipe recipe : each_recipe) {
    const torch::Tensor w = torch::randn({8, 16}).requires_grad_(), x = torch::randn({4, 16});
    const AutocastGuard guard(torch::kCPU, in_fp8(recipe));
    const torch::Tensor before = torch::linear(x, w);
    {
      const torch::NoGradGuard no_grad;
      w.narrow(0, 2, 1).mul_(100);
    }
    EXPECT_FALSE(torch::linear(x, w).equal(before));
    EXPECT_TRUE(torch::linear(x, w).equal(alone(recipe, x, w)));
    {
      const torch::NoGradGuard no_grad;
      w.view({-1})[5] = 1000;
    }
    EXPECT_TRUE(torch::linear(x, w.t().t()).equal(alone(recipe, x, w)));
    w.set_data(torch::randn({8, 16}));
    EXPECT_TRUE(torch::linear(x, w).equal(alone(recipe, x, w)));
  }
}

TEST(Fp8Edges, NestedGuardsHaveTheirOwnRecipesAndAnExceptionLeavesTheOuterOne) {
  torch::manual_seed(3);
  const torch::Tensor w = torch::randn({8, 40}).requires_grad_();
  const torch::Tensor x = torch::randn({4, 40}).requires_grad_();
  const AutocastGuard outer(torch::kCPU, in_fp8(Fp8Recipe::mxfp8));
  const torch::Tensor expected = alone(Fp8Recipe::mxfp8, x, w);
  EXPECT_TRUE(torch::linear(x, w).equal(expected));
  for (const Fp8Recipe recipe : each_recipe) {
    const AutocastGuard inner(torch::kCPU, in_fp8(recipe));
    EXPECT_TRUE(torch::linear(x, w).equal(alone(recipe, x, w)));
  }
  {
    const AutocastGuard inner(torch::kCPU, {.policy = Policy::standard()});
    EXPECT_TRUE(torch::linear(x, w).equal(torch::linear(x.to(at::kBFloat16), w.to(at::kBFloat16))));
  }
  {
    const AutocastGuard inner(torch::kCPU, {.enabled = false});
    EXPECT_EQ(torch::linear(x, w).scalar_type(), torch::kFloat);
  }
  try {
    const AutocastGuard inner(torch::kCPU, in_fp8(Fp8Recipe::nvfp4));
    const torch::Tensor y = torch::linear(x, w);
    EXPECT_ERROR(torch::linear(x, torch::randn({8, 41})), "cannot be multiplied");
    throw std::runtime_error("in the middle");
  } catch (const std::runtime_error&) {
  }
  const torch::Tensor y = torch::linear(x, w);
  EXPECT_TRUE(y.equal(expected));
  y.sum().backward();
  EXPECT_TRUE(w.grad().isfinite().all().item<bool>());
}

TEST(Fp8Edges, ARegionInFp32IsLeftAlone) {
  const torch::Tensor x = torch::randn({4, 16}), w = torch::randn({8, 16});
  torchamp::AutocastOptions options = in_fp8();
  options.dtype = torch::kFloat;
  torchamp::CastRecorder recorder;
  {
    const AutocastGuard guard(torch::kCPU, options);
    EXPECT_TRUE(torch::linear(x, w).equal(x.mm(w.t())));
    EXPECT_EQ(torch::linear(x, w).scalar_type(), torch::kFloat);
  }
  EXPECT_EQ(recorder.report().total().fp8, 0);
}

// What follows is for LibTorch's op to do or to refuse, as it does without the rule.
TEST(Fp8Edges, WhatLibTorchRefusesIsRefused) {
  const torch::Tensor x = torch::ones({3, 4}), w = torch::ones({5, 4});
  const std::vector<torch::Tensor> bad_biases = {torch::ones({4}),
                                                 torch::ones({2, 5}),
                                                 torch::ones({2, 3, 5}),
                                                 torch::ones({6, 1}),
                                                 torch::ones({5}, torch::kDouble),
                                                 torch::ones({5}, torch::kLong)};
  for (const torch::Tensor& bias : bad_biases) {
    const auto message = [&](const Policy& policy) -> std::string {
      const AutocastGuard guard(torch::kCPU, {.policy = policy});
      try {
        (void)torch::addmm(bias, x, w.t());
      } catch (const c10::Error& error) {
        return error.what_without_backtrace();
      }
      return "none";
    };
    const std::string expected = message(Policy::standard());
    EXPECT_NE(expected, "none") << bias.sizes() << bias.scalar_type();
    EXPECT_EQ(message(*in_fp8().policy), expected) << bias.sizes() << bias.scalar_type();
  }
  // A row to which a matrix is added: the result would have the matrix's size.
  const AutocastGuard guard(torch::kCPU, in_fp8());
  EXPECT_ERROR(torch::addmm(torch::ones({3, 5}), x.narrow(0, 0, 1), w.t()), "expand");
  EXPECT_ERROR(torch::linear(x.narrow(0, 0, 1), w, torch::ones({3, 5})), "");
  EXPECT_EQ(torch::addmm(torch::ones({3, 1}), x, w.t()).sizes(), (std::vector<int64_t>{3, 5}));
}

TEST(Fp8Edges, FactorsThatAreInFp8AlreadyRunInLowerPrecision) {
  const torch::Tensor x = torch::ones({3, 16}).to(at::kFloat8_e4m3fn), w = torch::ones({5, 16});
  torchamp::CastRecorder recorder;
  {
    const AutocastGuard guard(torch::kCPU, in_fp8());
    EXPECT_TRUE(torch::linear(x, w).equal(torch::full({3, 5}, 16, at::kBFloat16)));
  }
  EXPECT_EQ(recorder.report().total().fp8, 0);
  EXPECT_EQ(recorder.report().total().not_fp8.size(), 1u) << recorder.report();
}

TEST(Fp8Edges, FromTheSmallestToTheLargestNumbersResultsAreFinite) {
  for (const Fp8Recipe recipe : each_recipe) {
    const AutocastGuard guard(torch::kCPU, in_fp8(recipe));
    for (const int exponent : {-149, -130, -120, -111, -109, -60, 0, 60, 120, 126}) {
      const double magnitude = std::ldexp(1., exponent);
      const torch::Tensor x = torch::full({2, 16}, magnitude).requires_grad_();
      const torch::Tensor w = torch::full({3, 16}, 0x1p-5).requires_grad_();
      const torch::Tensor y = torch::linear(x, w);
      const double expected = magnitude / 2;
      EXPECT_TRUE(y.isfinite().all().item<bool>()) << static_cast<int>(recipe) << ' ' << exponent;
      if (exponent > -110) {
        const double relative = y[0][0].item<double>() / expected;
        EXPECT_NEAR(relative, 1, 0.07) << static_cast<int>(recipe) << ' ' << exponent;
      }
      y.backward(torch::ones({2, 3}, at::kBFloat16));
      EXPECT_TRUE(w.grad().isfinite().all().item<bool>()) << static_cast<int>(recipe) << exponent;
    }
  }
}

TEST(Fp8Edges, AWeightMayBeBothFactorsAndItsOwnTranspose) {
  torch::manual_seed(4);
  const torch::Tensor w = torch::randint(-1, 2, {16, 16}).to(torch::kFloat).requires_grad_();
  const auto gradient = [&](const Policy& policy) {
    w.mutable_grad() = torch::Tensor();
    const AutocastGuard guard(torch::kCPU, {.policy = policy});
    (w.mm(w) + torch::linear(w, w)).sum().backward();
    return w.grad();
  };
  const torch::Tensor expected = gradient(Policy::standard());
  EXPECT_TRUE(gradient(*in_fp8(Fp8Recipe::tensorwise).policy).equal(expected));
  EXPECT_TRUE(gradient(*in_fp8(Fp8Recipe::mxfp8).policy).equal(expected));
}

TEST(Fp8Edges, InputsOfManyDimensionsInAnyOrderAreTakenUnchanged) {
  torch::manual_seed(5);
  for (const Fp8Recipe recipe : each_recipe) {
    const torch::Tensor base = torch::randn({3, 20, 2, 5}).permute({3, 0, 2, 1}).requires_grad_();
    const torch::Tensor copy = base.detach().contiguous().requires_grad_();
    const torch::Tensor w = torch::randn({7, 20});
    const torch::Tensor g = torch::randn({7, 5, 3, 2}).to(at::kBFloat16).permute({1, 2, 3, 0});
    const AutocastGuard guard(torch::kCPU, in_fp8(recipe));
    const torch::Tensor y = torch::linear(base, w), of_copy = torch::linear(copy, w);
    EXPECT_TRUE(y.equal(of_copy));
    y.backward(g);
    of_copy.backward(g.contiguous());
    EXPECT_TRUE(base.grad().equal(copy.grad())) << static_cast<int>(recipe);
  }
}

TEST(Fp8Edges, ThreadsThatShareAWeightGetWhatOneGets) {
  torch::manual_seed(6);
  const torch::Tensor w = torch::randn({24, 24}).requires_grad_(), x = torch::randn({8, 24});
  for (const Fp8Recipe recipe : {Fp8Recipe::tensorwise, Fp8Recipe::mxfp8, Fp8Recipe::nvfp4}) {
    const auto run = [&] {
      const AutocastGuard guard(torch::kCPU, in_fp8(recipe));
      const torch::Tensor y = torch::linear(torch::linear(x, w), w);
      return torch::autograd::grad({y.sum()}, {w})[0];
    };
    const torch::Tensor expected = run();
    std::vector<torch::Tensor> results(4);
    std::vector<std::thread> threads;
    for (auto& result : results) threads.emplace_back([&] { result = run(); });
    for (std::thread& thread : threads) thread.join();
    for (const torch::Tensor& result : results) EXPECT_TRUE(result.equal(expected));
  }
}

}  // namespace
