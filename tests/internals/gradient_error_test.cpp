// SPDX-License-Identifier: BSD-3-Clause
// How an audit measures the error of a step's gradients.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "torchamp/labs/detail/audit/session.h"

namespace {

using torchamp::detail::gradient_error;

TEST(PrecisionAudit, CountsAGradientThatIsAllNoiseForNoMoreThanOneThatIsWrong) {
  const at::Tensor gradient = torch::ones({10}), nothing = torch::zeros({10});
  const at::Tensor noise = torch::full({10}, 0.5);
  EXPECT_NEAR(gradient_error({gradient * 1.1F, nothing}, {gradient, nothing}), 0.005, 1e-8);
  EXPECT_DOUBLE_EQ(gradient_error({gradient, noise}, {gradient, nothing}), 0.5);
  EXPECT_DOUBLE_EQ(gradient_error({gradient * 9., noise}, {gradient, nothing}), 1.);
  EXPECT_EQ(gradient_error({gradient, noise / 0.}, {gradient, nothing}), HUGE_VAL);
  EXPECT_EQ(gradient_error({gradient, at::Tensor()}, {gradient, nothing}), HUGE_VAL);
  EXPECT_EQ(gradient_error({gradient, noise}, {gradient, at::Tensor()}), 0.) << "no exact one";
  EXPECT_EQ(gradient_error({nothing}, {nothing}), 0.);
  EXPECT_EQ(gradient_error({}, {}), 0.);
}

}  // namespace
