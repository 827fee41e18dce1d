// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <c10/core/ScalarType.h>
#include <gtest/gtest.h>

/// How far a value computed in a dtype may lie from its reference. The only such numbers in the
/// tests.
struct Tolerance {
  double relative, absolute;
};

inline Tolerance tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return {1e-10, 1e-12};
    case at::kFloat:
      return {2e-5, 1e-6};
    case at::kHalf:
      return {2e-3, 2e-3};
    case at::kBFloat16:
      return {1.6e-2, 1.6e-2};
    default:
      return {0., 0.};
  }
}

/// Expects equal shapes and values within the tolerance of `dtype` (by default the dtype of
/// `actual`).
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected,
                         std::optional<at::ScalarType> dtype = std::nullopt) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  const Tolerance t = tolerance(dtype.value_or(actual.scalar_type()));
  const at::Tensor a = actual.detach().to(at::kCPU, at::kDouble);
  const at::Tensor e = expected.detach().to(at::kCPU, at::kDouble);
  EXPECT_TRUE(at::allclose(a, e, t.relative, t.absolute, /*equal_nan=*/true))
      << "largest difference: " << (a - e).abs().max().item<double>();
}
