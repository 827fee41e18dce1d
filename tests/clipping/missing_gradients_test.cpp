// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/missing_gradients.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <vector>

#include "support/optimizers.h"
#include "support/warnings.h"

using Reason = torchamp::MissingGradient::Reason;

TEST(MissingGradients, GivesTheReasonForEachParameter) {
  const at::Tensor with = parameter_with(torch::ones({1}));
  const at::Tensor frozen = torch::ones({2});
  const at::Tensor elsewhere = torch::ones({3}, torch::device(torch::kMeta)).requires_grad_();
  const at::Tensor unreached = torch::ones({4}, torch::requires_grad());
  auto optimizer = sgd({with, frozen});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({elsewhere, unreached}));
  // What optimizers do not accept, but may come to hold.
  optimizer.param_groups()[1].params().push_back(unreached * 2);
  optimizer.param_groups()[1].params().push_back(at::Tensor());

  const CollectedWarnings warnings;
  const auto missing = torchamp::missing_gradients(optimizer, at::Device(at::kCPU));
  EXPECT_EQ(warnings.text(), "");
  ASSERT_EQ(missing.size(), 5U);
  const Reason reasons[] = {Reason::not_required, Reason::other_device, Reason::not_reached,
                            Reason::not_a_leaf, Reason::undefined_parameter};
  for (std::size_t i = 0; i < missing.size(); ++i) EXPECT_EQ(missing[i].reason, reasons[i]) << i;
  EXPECT_EQ(missing[0].group, 0U);
  EXPECT_EQ(missing[0].index, 1U);
  EXPECT_TRUE(missing[0].parameter.is_same(frozen));
  EXPECT_EQ(missing[1].group, 1U);
  EXPECT_EQ(missing[1].index, 0U);
  EXPECT_EQ(missing[4].group, 1U);
  EXPECT_EQ(missing[4].index, 3U);

  std::ostringstream text;
  for (const auto& one : missing) text << one << '\n';
  EXPECT_THAT(text.str(), ::testing::HasSubstr(
                              "group 0, parameter 1 (Float [2] on cpu): requires_grad is false\n"));
  EXPECT_THAT(text.str(), ::testing::HasSubstr("(Float [3] on meta): on another device"));
  EXPECT_THAT(text.str(), ::testing::HasSubstr("group 1, parameter 3: the parameter is undefined"));
}

TEST(MissingGradients, IsEmptyIfEveryParameterHasOne) {
  const auto optimizer = sgd({parameter_with(torch::ones({1})), parameter_with(torch::ones({2}))});
  EXPECT_TRUE(torchamp::missing_gradients(optimizer).empty());
}

TEST(MissingGradients, LeavesOutANonLeafThatKeepsItsGradient) {
  const at::Tensor product = torch::ones({1}, torch::requires_grad()) * 2;
  auto optimizer = sgd({parameter_with(torch::ones({1}))});
  optimizer.param_groups()[0].params().push_back(product);
  EXPECT_EQ(torchamp::missing_gradients(optimizer).size(), 1U);
  product.retain_grad();
  product.sum().backward();
  EXPECT_TRUE(torchamp::missing_gradients(optimizer).empty());
}
