// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "torchamp/detail/core/scaler/plain_steps.h"
#include "torchamp/detail/core/scaler/shared_gradients.h"

namespace {

using torchamp::detail::PlainSteps;
using torchamp::detail::UnscaledGradients;

TEST(PlainSteps, LookAtTheFirstTwoIterationsWhateverTheWeightsAre) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(dtype);
    const at::Tensor weight = at::ones({2, 2}, dtype).requires_grad_();
    PlainSteps steps;
    const UnscaledGradients ours;
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(steps.is_looking());
      steps.add_leaves((weight * 2).sum());
      EXPECT_FALSE(steps.end_iteration(ours));
    }
    EXPECT_FALSE(steps.is_looking());
  }
}

}  // namespace
