// SPDX-License-Identifier: BSD-3-Clause
// Ops that LibTorch refuses in 16 bits, or with arguments of two dtypes, where cases.txt cannot say
// it: sparse matrices, random numbers, and calls that depend on an argument. See
// Note [What LibTorch refuses].
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/devices.h"
#include "support/op_call.h"
#include "support/op_case.h"
#include "torchamp/autocast.h"
#include "torchamp/policy.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::Policy;

struct Refused {
  const char* name;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> call;
};

/// Runs each call, with arguments in the two 16-bit dtypes and in fp32, and expects fp32. `grad`:
/// forward and backward.
void expect_fp32(const std::vector<Refused>& calls, const at::Tensor& first,
                 const at::Tensor& second, bool grad = false) {
  for (const at::ScalarType region : {at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType a : {at::kFloat, region}) {
      for (const at::ScalarType b : {at::kFloat, region}) {
        for (const Refused& refused : calls) {
          const at::Tensor x = first.to(a).detach(), y = second.to(b).detach();
          if (grad) y.requires_grad_();
          try {
            at::Tensor result;
            {
              const AutocastGuard guard(at::kCPU, {.dtype = region});
              result = refused.call(x, y);
            }
            EXPECT_EQ(result.scalar_type(), at::kFloat) << refused.name;
            if (!grad) continue;
            result.to_dense().sum().backward();
            EXPECT_TRUE(y.grad().defined()) << refused.name;
          } catch (const c10::Error& error) {
            ADD_FAILURE() << refused.name << ", " << a << " and " << b << " in a region of "
                          << region << ": " << error.what_without_backtrace();
          }
        }
      }
    }
  }
}

const at::Tensor matrix_with_zeros =
    at::tensor({1., 0., 2., 0., 3., 0., 4., 0., 5.}, at::kFloat).view({3, 3});
const at::Tensor matrix_of_weights = at::linspace(0.1, 1, 9).view({3, 3});

const std::vector<Refused> products = {
    {"_sparse_mm", [](const at::Tensor& a, const at::Tensor& b) { return at::_sparse_mm(a, b); }},
    {"_sparse_addmm",
     [](const at::Tensor& a, const at::Tensor& b) { return at::_sparse_addmm(b, a, b); }},
    {"mv", [](const at::Tensor& a, const at::Tensor& b) { return at::mv(a, b[0]); }},
};

TEST(RefusedOps, SparseProductsRunInFp32WithAndWithoutGradients) {
  for (const bool grad : {false, true}) {
    expect_fp32(products, matrix_with_zeros.to_sparse(), matrix_of_weights, grad);
    expect_fp32(products, matrix_with_zeros.to_sparse_csr(), matrix_of_weights, grad);
  }
}

TEST(RefusedOps, OtherSparseOpsRunInFp32) {
  expect_fp32(
      {{"_sparse_softmax",
        [](const at::Tensor& a, const at::Tensor&) { return at::_sparse_softmax(a, 1); }},
       {"_sparse_log_softmax",
        [](const at::Tensor& a, const at::Tensor&) { return at::_sparse_log_softmax(a, 1); }},
       {"smm", [](const at::Tensor& a, const at::Tensor& b) { return at::smm(a, b); }},
       {"hspmm", [](const at::Tensor& a, const at::Tensor& b) { return at::hspmm(a, b); }}},
      matrix_with_zeros.to_sparse(), matrix_of_weights);
  expect_fp32({{"sparse_sampled_addmm",
                [](const at::Tensor& a, const at::Tensor& b) {
                  return at::sparse_sampled_addmm(a, b, b);
                }}},
              matrix_with_zeros.to_sparse_csr(), matrix_of_weights);
}

// LibTorch's own autocast kernels of these see no layout. The guide's remedy.
TEST(RefusedOps, AnEditHasSparseMatricesInMatmulRunInFp32AndDenseOnesStillInTheRegionsDtype) {
  const Policy policy = Policy::standard().lower_precision({"mm", "matmul", "addmm", "bmm"});
  for (const bool csr : {false, true}) {
    const at::Tensor sparse =
        csr ? matrix_with_zeros.to_sparse_csr() : matrix_with_zeros.to_sparse();
    const at::Tensor w = matrix_of_weights.detach().clone().requires_grad_();
    const AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
    for (const at::Tensor& product :
         {at::mm(sparse, w), at::matmul(sparse, w), at::addmm(w, sparse, w)}) {
      EXPECT_EQ(product.scalar_type(), at::kFloat) << "CSR: " << csr;
      product.sum().backward();
    }
    EXPECT_EQ(at::mm(matrix_of_weights, matrix_of_weights).scalar_type(), at::kBFloat16);
  }
}

TEST(RefusedOps, SamplesAreDrawnInFp32OnACpu) {
  const at::Tensor positive = at::linspace(0.2, 0.9, 3);
  expect_fp32(
      {{"binomial", [](const at::Tensor& a, const at::Tensor& b) { return at::binomial(a, b); }},
       {"_sample_dirichlet",
        [](const at::Tensor& a, const at::Tensor&) { return at::_sample_dirichlet(a); }},
       {"_dirichlet_grad",
        [](const at::Tensor& a, const at::Tensor& b) { return at::_dirichlet_grad(a, b, a); }},
       {"_standard_gamma",
        [](const at::Tensor& a, const at::Tensor&) { return at::_standard_gamma(a); }},
       {"_standard_gamma_grad",
        [](const at::Tensor& a, const at::Tensor& b) { return at::_standard_gamma_grad(a, b); }}},
      positive, positive);
}

TEST(RefusedOps, AnInverseShortTimeTransformTakesA16BitWindow) {
  const at::Tensor window = at::linspace(0.5, 1, 8);
  const at::Tensor spectrum = at::stft(at::linspace(-1, 1, 16), 8, 4, 8, window, false, true, true);
  for (const at::ScalarType region : {at::kBFloat16, at::kHalf}) {
    const AutocastGuard guard(at::kCPU, {.dtype = region});
    EXPECT_EQ(at::istft(spectrum, 8, 4, 8, window.to(region)).scalar_type(), at::kFloat);
  }
}

TEST(RefusedOps, NoisyReluIsInFp32OnlyIfACpuHasNoKernelForIt) {
  const at::Tensor x = at::linspace(-1, 1, 4);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const AutocastGuard guard(at::kCPU, {.dtype = dtype});
    for (const bool training : {false, true}) {
      const bool lacks = training && dtype == at::kHalf;
      EXPECT_EQ(at::rrelu(x.to(dtype), 0.1, 0.3, training).scalar_type(),
                lacks ? at::kFloat : dtype)
          << dtype << ", training: " << training;
    }
  }
}

// Under LibTorch's own autocast they throw "Unexpected floating ScalarType" for one of the two.
TEST(RefusedOps, CatStackAndIndexCopyTakeBoth16BitDtypes) {
  const at::Tensor half = at::ones({2}, at::kHalf), brain = at::ones({2}, at::kBFloat16);
  const auto copied = [](const at::Tensor& a, const at::Tensor& b) {
    return a.index_copy(0, at::arange(2), b);
  };
  for (const at::ScalarType region : {at::kBFloat16, at::kHalf}) {
    const AutocastGuard guard(at::kCPU, {.dtype = region});
    for (const at::Tensor& x : {half, brain}) {
      for (const at::Tensor& y : {half, brain}) {
        const at::ScalarType widest = c10::promoteTypes(x.scalar_type(), y.scalar_type());
        EXPECT_EQ(at::cat({x, y}).scalar_type(), widest);
        EXPECT_EQ(at::stack({x, y}).scalar_type(), widest);
        EXPECT_EQ(copied(x, y).scalar_type(), widest);
        EXPECT_EQ(at::dot(x, y).scalar_type(), widest);
      }
    }
  }
}

TEST(RefusedOps, LowRankNormsAndPolarDecompositionsTake16Bits) {
  const at::Tensor matrix = at::linspace(-1, 2, 12).view({3, 4});
  expect_fp32(
      {{"linalg_matrix_norm",
        [](const at::Tensor&, const at::Tensor& x) { return at::linalg_matrix_norm(x, 2); }},
       {"linalg_norm",
        [](const at::Tensor&, const at::Tensor& x) { return at::linalg_norm(x, -2); }},
       {"linalg_norm, nuc",
        [](const at::Tensor&, const at::Tensor& x) { return at::linalg_norm(x, "nuc"); }}},
      matrix, matrix, /*grad=*/true);
}

TEST(RefusedOps, TakeTheirDtypeFromAFp32ArgumentAsBefore) {
  const AutocastGuard guard(at::kCPU);
  const at::Tensor x = at::linspace(-1, 1, 4).view({2, 2});
  EXPECT_TRUE(at::view_as_complex(x).is_alias_of(x)) << "a view without need of a cast";
  EXPECT_EQ(at::fft_fft(x).scalar_type(), at::kComplexFloat);
}

// What a GPU refuses is in tests/parity/autocast_cuda.txt: every case there that ends in an error
// in a 16-bit dtype only.
TEST(RefusedOps, WhatAGpuRefusesIn16BitsHasARuleThatCastsOnCuda) {
  const Policy policy = Policy::standard();
  int refused = 0;
  for (const CaseSection& section :
       read_cases(std::string(TORCHAMP_TEST_PARITY_DIR) + "/autocast_cuda.txt")) {
    for (const OpCase& op_case : section.cases) {
      const auto op = find_op(op_case.op);
      if (!op || !op_case.varies) continue;
      for (const char* const region : {"bfloat16", "float16"}) {
        const auto result = [&](const std::string& x) {
          const auto found = op_case.results.find(std::string(region) + ' ' + x);
          return found == op_case.results.end() ? std::string() : found->second;
        };
        if (!result(region).starts_with("error") || result("float32").starts_with("error"))
          continue;
        ++refused;
        const Cast rule = policy.lookup(c10::toString(op->operator_name()), at::kCUDA);
        EXPECT_TRUE(rule == Cast::fp32 || rule == Cast::promote) << op_case.text << ": " << rule;
      }
    }
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
